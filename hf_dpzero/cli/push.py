"""`hf-dpzero push OUTPUT_DIR`: publish a finished run with its privacy card."""

from __future__ import annotations

from hf_dpzero.cli.options import Push
from hf_dpzero.reporting import hub


def run(arguments: Push) -> None:
    """Ships what may be shipped, or with --dry_run leaves exactly that in a local folder."""
    address = hub.push(
        arguments.output_dir,
        arguments.repo_id,
        private=arguments.private,
        dry_run=arguments.dry_run,
        allow_not_private=arguments.allow_not_private,
    )
    print(f"the folder that would be uploaded: {address}" if arguments.dry_run else address)
