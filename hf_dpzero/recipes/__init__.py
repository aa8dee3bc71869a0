"""Recipes: a flat YAML file becomes a model, a task and a trainer.

Promises: unknown keys and ill-typed values are refused with the nearest known key; the base model is a
pure function of the checkpoint and the recipe, so that a trajectory can be replayed from it.
May import: all rooms below it in docs/architecture.md but estimators. Loads transformers.
Start reading at `recipe.load_recipe`, then `build.build_trainer`.
"""
