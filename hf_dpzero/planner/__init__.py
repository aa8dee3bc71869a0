"""`hf-dpzero plan --recipe`: what a run will spend, need and take, before a weight is downloaded."""
