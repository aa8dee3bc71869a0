#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, format, types, doctests and tests, docs.
#   scripts/check.sh          the quick tests
#   scripts/check.sh --all    also those marked slow, statistical or gpu (skipped without a GPU)
# Words after these go to pytest: scripts/check.sh --all -k plan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # pytest runs two processes
unset PYTHONDONTWRITEBYTECODE                  # tests start many processes: none compiles anew

select=()
if [[ "${1:-}" == "--all" ]]; then
  select=(-m "")
  shift
fi

step() { printf '\n== %s\n' "$*"; "$@"; }

docs() { # a build into a folder that is thrown away
  local site status=0
  site="$(mktemp -d)"
  mkdocs build --strict --quiet --site-dir "$site" || status=$?
  rm -rf "$site"
  return "$status"
}

step ruff check .
step ruff format --check .
if command -v mkdocs >/dev/null; then # on one core, while mypy takes the other
  export NO_MKDOCS_2_WARNING=1         # an announcement by the theme, on every build
  said="$(mktemp)"
  trap 'rm -f "$said"' EXIT
  docs >"$said" 2>&1 &
  building=$!
  failed=0
  step mypy || failed=1
  wait "$building" || failed=1
  printf '\n== mkdocs build --strict --quiet\n'
  cat "$said"
  [[ "$failed" == 0 ]]
else
  step mypy
fi
# a module's tests run in one process, as its fixtures are made once; those with slow tests come first
step python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
  ${select[@]+"${select[@]}"} "$@"
