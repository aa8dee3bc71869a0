"""Recipes: a flat YAML file becomes a model, a task and a trainer.

Promises: unknown keys and ill-typed values are refused with the nearest known key; the base model is a
pure function of the checkpoint and the recipe, so that a trajectory can be replayed from it.
May import: all rooms below it in docs/architecture.md but estimators. Loads transformers.
Start reading at `recipe.load_recipe`, then `build.build_trainer`.

| file | what it answers |
|---|---|
| `recipe`, `arguments` | which keys there are, how a file and the command line become them |
| `build` | how task, model and trainer are made of them |
| `models`, `adapters` | where a checkpoint comes from; its head; LoRA, prefix, biases |
| `sentence_classifier` | a sentence encoder with a linear head, and its features computed once |
| `public_features` | principal components of its features, fitted to public text |
| `holdout` | which training rows are held out for private evaluation |
| `starter` | what `init` writes for a file of the user's own |
| `catalogue` | what the shipped recipes run, and what the paper reports for them |
"""
