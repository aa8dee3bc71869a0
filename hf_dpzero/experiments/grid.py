"""Which runs a comparison consists of: methods x epsilons x seeds, on the same data.

Every method trains on the same rows under the same neighbouring relation and delta; whatever else its
recipe says (model, clip, steps, learning rate, sampler, accountant) is the method's own. Each sampler
and accountant states a valid epsilon, so methods may differ in those.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.recipes.recipe import (
    Recipe,
    build_recipe,
    load_recipe,
    parse_overrides,
    recipe_chain,
)
from hf_dpzero.shipped import find_recipe
from hf_dpzero.tasks.arguments import DataArguments

METHODS_FOLDER = "methods"
"""Beside a recipe or above its folder; it holds one file a method, such as `_minilm-dp-adamw.yaml`."""

SET_BY_THE_GRID = {
    "method": "--methods", "target_epsilon": "--epsilons", "noise_multiplier": "--epsilons",
    "seed": "--seeds", "subset_seed": "--seeds", "init_seed": "--seeds",
    "testing.direction_key": "--seeds",
    "output_dir": "--output_dir of the comparison", "resume_from_checkpoint": "the comparison itself",
}  # fmt: skip
_ADAPTER_METHODS = ("dp-lora", "lora", "dp-bitfit", "bitfit", "dp-prefix", "prefix")
_LARGEST_SEED = 2**32 - 1  # numpy's, which Hugging Face seeds


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    name: str  # of its folder, for example "dp-adamw-eps2-seed42", or "003" in a sweep
    method: str  # its name: as given in --methods, or the stem of the recipe that was given
    source: str  # which files its settings come from
    epsilon: float  # the target that its privacy report is held to; inf if there is none
    recipe: Recipe  # all settings but output_dir
    trial: int | None = None  # its number in a sweep, from 0
    point: Mapping[str, Any] | None = None  # the swept settings
    metric: str | None = None  # key of `all_results.json` that scores it; None: the task's metric

    @property
    def private(self) -> bool:
        """True if the run spends a privacy budget."""
        return not self.recipe.training.not_private

    @property
    def seed(self) -> int:
        """Of the initial weights; in a comparison also of the few-shot draw and the directions."""
        return self.recipe.training.seed

    @property
    def digest(self) -> str:
        """16 hex digits that change with every setting of the run, and from trial to trial."""
        values = {k: v for k, v in self.recipe.values.items() if k != "output_dir"}
        if self.trial is not None:
            values["trial"] = self.trial
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self, output_dir: str) -> str:
        """The run as a recipe of its own, that trains into `output_dir`."""
        values = {**self.recipe.values, "output_dir": output_dir}
        return dataclasses.replace(self.recipe, values=values).to_yaml()


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of a comparison, before an epsilon and a seed are laid over it."""

    name: str
    source: str
    chain: Sequence[tuple[Path, Mapping[str, Any]]]  # its files' keys; later files replace earlier
    fixed: Mapping[str, Any]  # settings of each of its runs that replace those of the files
    recipe: Recipe  # as loaded with them, at some epsilon

    @property
    def private(self) -> bool:
        """Whether it runs once an epsilon; without privacy it runs once a seed, at epsilon = inf."""
        return not self.recipe.training.not_private


def build_grid(
    recipe: str | Path,
    *,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
) -> list[Run]:
    """All runs: seed by seed the methods in the given order, and a method's epsilons together.

    Args:
      recipe: the recipe that every method's recipe must agree with on the data.
      methods: entries of --methods; `_find_method` says what they may be.
      epsilons: targets of the private methods; none takes the recipe's own target_epsilon.
      seeds: each sets seed, subset_seed (the few-shot draw), init_seed and direction_key; none takes
        the recipe's own seed.
      overrides: command-line words that hold for every run.

    Returns:
      The runs, all with different settings.

    Raises:
      ValueError: nothing to run, a value out of range, or methods that cannot be compared.
    """
    settings = dict(parse_overrides(overrides))
    for name, option in SET_BY_THE_GRID.items():
        if name in settings:
            raise ValueError(
                f"--{name} {settings[name]}: set by {option} for each run of the grid; leave it out."
            )
    recipe = find_recipe(recipe)
    base = load_recipe(recipe, settings)
    own = base.training.target_epsilon
    epsilons = list(epsilons) or ([] if own is None else [own])
    for epsilon in epsilons and _each_once("epsilons", epsilons, "--epsilons 2,6"):
        if not 0 < epsilon < math.inf:
            raise ValueError(
                f"epsilon={epsilon:g} must be a finite number above 0; methods without privacy "
                "(mezo, sgd, adamw) need none."
            )
    seeds = list(seeds) or [base.training.seed]
    for seed in _each_once("seeds", seeds, "--seeds 42,13,21"):
        if not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"seed={seed} must lie in 0..{_LARGEST_SEED}.")
    names = _each_once("methods", methods, "--methods dpzero,mezo")
    some_epsilon = epsilons[0] if epsilons else 1.0
    compared = [_find_method(name, recipe, base, settings, some_epsilon) for name in names]
    if not epsilons and any(method.private for method in compared):
        raise ValueError("there are no epsilons; give e.g. --epsilons 2,6.")
    _each_once("methods (by name)", [method.name for method in compared], "each once")
    _check_comparable(compared)
    runs = [
        _run(method, epsilon, seed)
        for seed in seeds
        for method in compared
        for epsilon in (epsilons if method.private else [math.inf])
    ]
    first: dict[str, Run] = {}
    for run in runs:  # two runs with the same settings would share a row
        if (twin := first.setdefault(run.digest, run)) is not run:
            raise ValueError(
                f"methods {twin.method!r} and {run.method!r} have the same settings ({twin.source}; "
                f"{run.source}); name one of them."
            )
    return runs


def _run(method: Method, epsilon: float, seed: int) -> Run:
    settings: dict[str, Any] = {
        "target_epsilon": epsilon if method.private else None,
        "noise_multiplier": None,
        "seed": seed,
        "subset_seed": seed,
        "init_seed": seed,
        "resume_from_checkpoint": None,
        "disable_tqdm": True,  # the log of a run is a file
    }
    if not method.recipe.training.first_order:
        settings["testing.direction_key"] = seed
    return Run(
        name=f"{method.name}-eps{epsilon:.12g}-seed{seed}",
        method=method.name,
        source=method.source,
        epsilon=epsilon,
        recipe=build_recipe(method.chain, {**method.fixed, **settings}, method.source),
    )


def _find_method(
    method: str, recipe: Path, base: Recipe, settings: Mapping[str, Any], epsilon: float
) -> Method:
    """Finds the settings that `method` trains with; the first of these that exists.

    1. The recipe NAME-METHOD.yaml beside `recipe`, where NAME is what stands before the method in the
       name of `recipe`: "dp-adamw" takes sst2/minilm-dp-adamw.yaml beside sst2/minilm-dpzero.yaml.
    2. The recipe file whose path is `method`.
    3. `recipe` with the keys of a method's file in place of its own: `_NAME-METHOD.yaml` in a folder
       "methods" beside or above `recipe`; where there is none, NAME loses its last word
       ("minilm-fewshot" -> "minilm"). A file of the same kind that `recipe` extends for its own method
       is left out, and so is this step where `recipe` is a recipe for METHOD whose name names none.
    4. `recipe` with `method: METHOD`.
    """
    from hf_dpzero.settings.nested import METHODS

    fixed, name = dict(settings), method
    beside = recipe.parent / _sibling_name(recipe, method, base.training.method)
    unnamed = beside.stem == f"{recipe.stem}-{method}"
    shared = _method_file(recipe, beside, method)
    if beside.is_file():
        chain, source = recipe_chain(beside), str(beside)
    elif Path(method).is_file():
        chain, source, name = recipe_chain(Path(method)), method, Path(method).stem
    elif shared is not None and not (method == base.training.method and unnamed):
        prefix = shared.name.removesuffix(f"{method}{shared.suffix}")
        own = [
            (file, keys)
            for file, keys in recipe_chain(recipe)
            if file.parent.resolve() != shared.parent.resolve() or not file.name.startswith(prefix)
        ]
        chain, source = [*own, *recipe_chain(shared)], f"{recipe} with {shared}"
    elif method in METHODS:
        chain, source = recipe_chain(recipe), f"{recipe} with method: {method}"
        fixed["method"] = method
    else:
        raise ValueError(
            f"method {method!r} is no method ({', '.join(METHODS)}), no recipe file, and "
            f"{recipe.parent} has no {beside.name}."
        )
    target = {"target_epsilon": epsilon, "noise_multiplier": None}
    try:
        loaded = build_recipe(chain, {**fixed, **target}, source)
    except ValueError as error:
        raise ValueError(f"method {method!r}: {error}") from error
    return Method(name=name, source=source, chain=chain, fixed=fixed, recipe=loaded)


def _sibling_name(recipe: Path, method: str, own_method: str = "dpzero") -> str:
    """What the recipe for `method` beside `recipe` would be called.

    In the stem of `recipe`, the name of a method ends the part that siblings share.

    >>> _sibling_name(Path("trec/minilm-dpzero.yaml"), "dp-adamw")
    'minilm-dp-adamw.yaml'
    >>> _sibling_name(Path("roberta-large-dp-lora.yaml"), "dpzero", "dp-adamw")
    'roberta-large-dpzero.yaml'
    >>> _sibling_name(Path("quickstart.yaml"), "mezo")
    'quickstart-mezo.yaml'
    """
    from hf_dpzero.settings.nested import METHODS

    known = sorted({*METHODS, *_ADAPTER_METHODS, own_method}, key=len, reverse=True)
    named = re.search(rf"-(?:{'|'.join(map(re.escape, known))})(?:-|$)", recipe.stem)
    stem = recipe.stem[: named.start()] if named else recipe.stem
    return f"{stem}-{method}{recipe.suffix or '.yaml'}"


def _method_file(recipe: Path, sibling: Path, method: str) -> Path | None:
    """`_NAME-METHOD.yaml` of the longest NAME, in the nearest folder that has one."""
    words = sibling.stem.removesuffix(f"-{method}").split("-")
    names = ["-".join(words[:count]) for count in range(len(words), 0, -1)]
    near = (recipe.parent, Path(os.path.normpath(recipe.parent / "..")))
    files = [(place, f"_{name}-{method}{sibling.suffix}") for name in names for place in near]
    paths = [place / METHODS_FOLDER / file for place, file in files]
    return next((path for path in paths if path.is_file()), None)


def _check_comparable(methods: Sequence[Method]) -> None:
    """Refuses methods that differ in their data or, among private ones, in what epsilon means."""
    for field in dataclasses.fields(DataArguments):
        if field.name != "subset_seed":  # the grid sets it
            values = [getattr(method.recipe.data, field.name) for method in methods]
            _check_equal(methods, field.name, [repr(v) for v in values], "are of different data")
    private = [method for method in methods if method.private]
    relations = [method.recipe.training.neighboring_relation for method in private]
    deltas, different = [delta_of(m.recipe) for m in private], "mean different things by epsilon"
    _check_equal(private, "neighboring_relation", relations, different)
    _check_equal(private, "target_delta", deltas, different)
    for method in methods:
        if method.recipe.training.push_to_hub:
            raise ValueError(
                f"push_to_hub=True in {method.source} would publish every run of the grid; set it to "
                "false, and push the run that you want with `hf-dpzero push`."
            )


def _check_equal(methods: Sequence[Method], name: str, values: Sequence[str], what: str) -> None:
    for method, value in zip(methods, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"{methods[0].source} and {method.source} {what}: {name} is {values[0]} in the first "
                f"and {value} in the second. Give both the same, e.g. --{name} after the recipe."
            )


def delta_of(recipe: Recipe) -> str:
    """A recipe's delta in words; on the same rows two deltas are equal iff these words are."""
    training = recipe.training
    if training.target_delta is not None:
        return f"{training.target_delta:g}"
    return "0" if training.noise_distribution == "laplace" else "1 / (10 n)"


def _each_once(what: str, values: Sequence[Any], example: str) -> list[Any]:
    if not values:
        raise ValueError(f"there are no {what}; give e.g. {example}.")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{what}: {value!r} is given more than once; give it once.")
    return list(values)
