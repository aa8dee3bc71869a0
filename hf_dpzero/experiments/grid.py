"""Which runs a comparison consists of: methods x epsilons x seeds, on the same data.

Every arm trains on the same rows under the same neighbouring relation and delta; whatever else its
recipe says (model, clip, steps, learning rate, sampler, accountant) is the arm's own. Each sampler
and accountant states a valid epsilon, so arms may differ in those.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.recipes.recipe import Recipe, load_recipe, parse_overrides
from hf_dpzero.tasks.arguments import DataArguments

SET_BY_THE_GRID = {
    "method": "--methods",
    "target_epsilon": "--epsilons",
    "noise_multiplier": "--epsilons",
    "seed": "--seeds",
    "subset_seed": "--seeds",
    "init_seed": "--seeds",
    "direction_key": "--seeds",
    "output_dir": "--output_dir of the comparison",
    "resume_from_checkpoint": "the comparison itself",
}
_OTHER_ARMS = ("dp-lora", "lora", "dp-bitfit", "bitfit", "dp-prefix", "prefix")
_LARGEST_SEED = 2**32 - 1  # numpy's, which Hugging Face seeds


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One method of a comparison.

    Attributes:
      name: as given in --methods, or the stem of the recipe that was given.
      path: the recipe it trains by.
      fixed: settings laid over the recipe in each of its runs.
      recipe: as loaded with them, at some epsilon.
      private: whether it spends a budget; if not it runs once for each seed, at epsilon = inf.
    """

    name: str
    path: Path
    fixed: Mapping[str, Any]
    recipe: Recipe
    private: bool

    @property
    def source(self) -> str:
        """Where its settings come from, in words."""
        own = "method" not in self.fixed
        return str(self.path) if own else f"{self.path} with method: {self.fixed['method']}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of the grid; `recipe` holds all its settings but output_dir."""

    arm: Arm
    epsilon: float
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """Names its folder, for example "dp-adamw-eps2-seed42"."""
        return f"{self.arm.name}-eps{self.epsilon:.12g}-seed{self.seed}"

    @property
    def digest(self) -> str:
        """16 hex digits that change whenever a setting of the run does."""
        values = {k: v for k, v in self.recipe.values.items() if k != "output_dir"}
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self, output_dir: str) -> str:
        """The run as a recipe of its own, that trains into `output_dir`."""
        values = {**self.recipe.values, "output_dir": output_dir}
        return dataclasses.replace(self.recipe, values=values).to_yaml()


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
      methods: entries of --methods; see `arm_of`.
      epsilons: targets of the private methods; none takes the recipe's own target_epsilon.
      seeds: each sets seed, subset_seed (the few-shot draw), init_seed and direction_key.
      overrides: command-line words that hold for every run.

    Raises:
      ValueError: nothing to run, a value out of range, or arms that cannot be compared.
    """
    settings = _checked_overrides(overrides)
    base = load_recipe(recipe, settings)
    own = base.training.target_epsilon
    epsilons = _checked_epsilons(epsilons or ([] if own is None else [own]))
    seeds = _checked_seeds(seeds)
    names = _unique("methods", methods, "--methods dpzero,mezo")
    probe = epsilons[0] if epsilons else 1.0
    arms = [arm_of(name, Path(recipe), base, settings, probe) for name in names]
    if not epsilons and any(arm.private for arm in arms):
        raise ValueError("there are no epsilons; give e.g. --epsilons 2,6.")
    _unique("methods (by name)", [arm.name for arm in arms], "each once")
    check_comparable(arms)
    runs = [
        _run(arm, epsilon, seed)
        for seed in seeds
        for arm in arms
        for epsilon in (epsilons if arm.private else [math.inf])
    ]
    _refuse_equal(runs)
    return runs


def arm_of(
    method: str, recipe: Path, base: Recipe, settings: Mapping[str, Any], epsilon: float
) -> Arm:
    """The recipe beside `recipe` that is named for `method`, a path, or `recipe` with that method.

    Args:
      method: "dp-adamw" takes "minilm-dp-adamw.yaml" beside "minilm-dpzero.yaml" where it exists.
      recipe, base: the recipe compared with, and as loaded.
      settings: overrides of every arm.
      epsilon: to load private recipes with, which need one.

    Raises:
      ValueError: no such recipe, file or method, or settings that `DPZeroConfig` refuses.
    """
    from hf_dpzero.training.config import METHODS, NOT_PRIVATE

    path, fixed = sibling(recipe, method, base.training.method), dict(settings)
    name = method
    if path is None and Path(method).is_file():
        path, name = Path(method), Path(method).stem
    if path is None and method in METHODS:
        path, fixed = recipe, {**settings, "method": method}
    if path is None:
        raise ValueError(
            f"method {method!r} is no method ({', '.join(METHODS)}), no recipe file, and "
            f"{recipe.parent} has no {sibling_name(recipe, method, base.training.method)}."
        )
    target = {"target_epsilon": epsilon, "noise_multiplier": None}
    try:
        loaded = load_recipe(path, {**fixed, **target})
    except ValueError as error:
        raise ValueError(f"method {method!r}: {error}") from error
    private = loaded.training.method not in NOT_PRIVATE
    return Arm(name=name, path=path, fixed=fixed, recipe=loaded, private=private)


def sibling(recipe: Path, method: str, own_method: str) -> Path | None:
    """The recipe for `method` beside `recipe`, or None if there is none."""
    path = recipe.parent / sibling_name(recipe, method, own_method)
    return path if path.is_file() else None


def sibling_name(recipe: Path, method: str, own_method: str = "dpzero") -> str:
    """What the recipe for `method` beside `recipe` would be called.

    The stem is what stands before the name of a method.

    >>> sibling_name(Path("trec/minilm-dpzero.yaml"), "dp-adamw")
    'minilm-dp-adamw.yaml'
    >>> sibling_name(Path("roberta-large-dp-lora.yaml"), "dpzero", "dp-adamw")
    'roberta-large-dpzero.yaml'
    >>> sibling_name(Path("quickstart.yaml"), "mezo")
    'quickstart-mezo.yaml'
    """
    from hf_dpzero.training.config import METHODS

    known = sorted({*METHODS, *_OTHER_ARMS, own_method}, key=len, reverse=True)
    found = re.search(rf"-(?:{'|'.join(map(re.escape, known))})(?:-|$)", recipe.stem)
    stem = recipe.stem[: found.start()] if found else recipe.stem
    return f"{stem}-{method}{recipe.suffix or '.yaml'}"


def check_comparable(arms: Sequence[Arm]) -> None:
    """Refuses arms that differ in their data or, among private ones, in what epsilon means.

    Raises:
      ValueError: names the setting and both values.
    """
    first = arms[0]
    for field in dataclasses.fields(DataArguments):
        if field.name == "subset_seed":  # the grid sets it
            continue
        for arm in arms[1:]:
            ours, theirs = (getattr(a.recipe.data, field.name) for a in (first, arm))
            if ours != theirs:
                raise ValueError(
                    f"{first.source} and {arm.source} are of different data: {field.name} is "
                    f"{ours!r} in the first and {theirs!r} in the second. Give both the same, e.g. "
                    f"--{field.name} after the recipe."
                )
    private = [arm for arm in arms if arm.private]
    for arm in private[1:]:
        _check_same_guarantee(private[0], arm)
    for arm in arms:
        if arm.recipe.training.push_to_hub:
            raise ValueError(
                f"push_to_hub=True in {arm.source} would publish every run of the grid; set it to "
                "false, and push the run that you want with `hf-dpzero push`."
            )


def _check_same_guarantee(first: Arm, other: Arm) -> None:
    for name, ours, theirs in (
        ("neighboring_relation", *(a.recipe.training.neighboring_relation for a in (first, other))),
        ("target_delta", delta_of(first), delta_of(other)),
    ):
        if ours != theirs:
            raise ValueError(
                f"{first.source} and {other.source} mean different things by epsilon: {name} is "
                f"{ours} in the first and {theirs} in the second. Give both the same, e.g. --{name} "
                "after the recipe."
            )


def delta_of(arm: Arm) -> str:
    """The arm's delta in words; two arms on the same rows have the same delta iff these agree."""
    training = arm.recipe.training
    if training.target_delta is not None:
        return f"{training.target_delta:g}"
    return "0" if training.noise_distribution == "laplace" else "1 / (10 n)"


def _refuse_equal(runs: Sequence[Run]) -> None:
    """Two runs with the same settings would be one row."""
    by_digest: dict[str, Run] = {}
    for run in runs:
        twin = by_digest.setdefault(run.digest, run)
        if twin is not run:
            raise ValueError(
                f"methods {twin.arm.name!r} and {run.arm.name!r} have the same settings "
                f"({twin.arm.source}; {run.arm.source}); name one of them."
            )


def _run(arm: Arm, epsilon: float, seed: int) -> Run:
    from hf_dpzero.training.config import FIRST_ORDER

    settings: dict[str, Any] = {
        **arm.fixed,
        "target_epsilon": epsilon if arm.private else None,
        "noise_multiplier": None,
        "seed": seed,
        "subset_seed": seed,
        "init_seed": seed,
        "resume_from_checkpoint": None,
        "disable_tqdm": True,  # the log of a run is a file
    }
    if arm.recipe.training.method not in FIRST_ORDER:
        settings["direction_key"] = seed
    return Run(arm=arm, epsilon=epsilon, seed=seed, recipe=load_recipe(arm.path, settings))


def _checked_overrides(words: Sequence[str]) -> dict[str, Any]:
    settings = parse_overrides(words)
    for name, option in SET_BY_THE_GRID.items():
        if name in settings:
            raise ValueError(
                f"--{name} {settings[name]}: set by {option} for each run of the grid; leave it out."
            )
    return dict(settings)


def _checked_epsilons(epsilons: Sequence[float]) -> list[float]:
    for epsilon in epsilons:
        if not 0 < epsilon < math.inf:
            raise ValueError(
                f"epsilon={epsilon:g} must be a finite number above 0; methods without privacy "
                "(mezo, sgd, adamw) need none."
            )
    return _unique("epsilons", epsilons, "--epsilons 2,6") if epsilons else []


def _checked_seeds(seeds: Sequence[int]) -> list[int]:
    for seed in _unique("seeds", seeds, "--seeds 42,13,21"):
        if not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"seed={seed} must lie in 0..{_LARGEST_SEED}.")
    return list(seeds)


def _unique(what: str, values: Sequence[Any], example: str) -> list[Any]:
    if not values:
        raise ValueError(f"there are no {what}; give e.g. {example}.")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{what}: {value!r} stands there more than once; give it once.")
    return list(values)
