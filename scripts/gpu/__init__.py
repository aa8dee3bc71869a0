"""What `python -m scripts.gpu` finds out in the first hour on a GPU, a file for each kind of stage.

`stages.py` lists them in order, `results.py` keeps what ended, `tables.py` shows it. Nothing here needs
opacus, datasets, OpenDP or dp-accounting but `pack.py`, which runs where these are installed.
"""
