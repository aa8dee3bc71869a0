"""The two apps of a federated run, made by the installed package."""

from hf_dpzero.federated.flower import client_app, server_app

client = client_app()
server = server_app()
