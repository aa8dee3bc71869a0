"""`hf-dpzero sweep`: try settings, say what choosing among them costs, keep the secrets secret."""
