"""Algorithms of the papers on explicit objectives, where every number can be checked."""
