"""Checks before step 0: of the data, the model, the evaluation rows and what a subclass overrides."""
