"""What `python -m scripts.on_gpu` runs on a machine with a GPU, a file for each kind of stage.

`stages.py` lists them in order, `results.py` keeps what ended, `tables.py` shows it. Nothing here needs
opacus, datasets, OpenDP or dp-accounting but `pack.py`, which runs where these are installed.
"""
