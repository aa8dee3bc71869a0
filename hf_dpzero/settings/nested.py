"""Settings that belong together: nested in `DPZeroConfig` as a dataclass, a mapping or its JSON.

DPZeroConfig(..., clipping_config={"quantile": 0.7})
clipping_config: {quantile: 0.7}               # in a recipe
--clipping_config '{"quantile": 0.7}'          # or --clipping_config.quantile 0.7
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

from hf_dpzero.estimators.finite_differences import STRATEGIES
from hf_dpzero.privacy.correlated.correlation import Correlation
from hf_dpzero.privacy.group_losses import GROUP_LOSSES
from hf_dpzero.settings.setting import (
    BITS_128,
    COUNT,
    HEX_KEY,
    POSITIVE,
    SHARE,
    TEXT,
    TRUTH,
    Allowed,
    setting,
)
from hf_dpzero.values import nearest

ZEROTH_ORDER = ("dpzero", "dpgd-0th", "mezo")
FIRST_ORDER = ("dp-sgd", "dp-adamw", "sgd", "adamw")
METHODS = (*ZEROTH_ORDER, *FIRST_ORDER)
NOT_PRIVATE = ("mezo", "sgd", "adamw")
PRIVATE = tuple(method for method in METHODS if method not in NOT_PRIVATE)
SGD, ADAMW = ("dp-sgd", "sgd"), ("dp-adamw", "adamw")
"""First-order methods by torch's optimizer."""

CORRELATIONS = ("none", "toeplitz", "banded", "optimized", "tree")
BANDS = 32
"""`correlated_noise.bands` where none are given: within 3 % of `toeplitz` at 256 steps."""

T = TypeVar("T")
if TYPE_CHECKING:  # once a config is made, its field holds the dataclass
    Given = Annotated[T, "or None, a mapping, or its JSON"]
else:  # HfArgumentParser takes the second member that is not None: text on a command line
    Given = Union[T, str, dict[str, Any], None]  # noqa: UP007


class Nested:
    """A parent of the dataclasses below."""

    @classmethod
    def read(cls, name: str, given: Any) -> Any:
        """Returns what `DPZeroConfig(name=given)` asks for, ranges unchecked; an object is copied.

        Raises:
          ValueError: no JSON, no mapping, or an unknown key (the nearest is named).
        """
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}={given!r} is no JSON: {error}.") from None
        if isinstance(given, cls):
            # A copy: two configurations that shared the object would change together.
            return dataclasses.replace(given)  # type: ignore[type-var]
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(
                f"{name}={given!r} must be a {cls.__name__}, a mapping {{name: value}}, or its JSON."
            )
        fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if unknown := [str(key) for key in given or {} if key not in fields]:
            near = nearest(unknown[0], fields)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(fields)}."
            raise ValueError(f"{name} has no {unknown[0]!r}; {hint}")
        return cls(**given or {})


PRIVATELY, ZEROTH = ("method", PRIVATE), ("method", ZEROTH_ORDER)
ADAPTIVE = ("clipping", ("adaptive",))
RELEASED = ("group_robust.weights", ("per_step", "prefix_sum", "vertex"))
"""What a setting needs: another setting, and the values of that with which it has an effect."""


def part(kind: type[Nested]) -> Any:
    """Returns the field of `DPZeroConfig` that holds a `kind`, named and described in its help."""
    names = ", ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
    return setting(None, f"{{{names}}}: {(kind.__doc__ or '').rstrip('.')}")


@dataclass
class ClippingConfig(Nested):
    """What `clipping` other than fixed needs: adaptive, automatic and averaged in turn."""

    quantile: float = setting(0.5, "share of examples to leave unclipped", SHARE, needs=ADAPTIVE)
    learning_rate: float = setting(
        0.2,
        "rate of the geometric update of C",
        Allowed("a number in [0, 10]", lambda x: 0 <= x <= 10),
        needs=ADAPTIVE,
    )
    count_noise: float | None = setting(
        None,
        "noise std on the count of unclipped examples",
        POSITIVE,
        needs=ADAPTIVE,
        privacy="the smaller, the more of the budget goes to the count",
        none="B / 20, or the step's noise multiplier where that is larger",
    )
    stability: float = setting(
        0.01,
        "gamma in C / (norm + gamma), norm of a gradient",
        POSITIVE,
        needs=("clipping", ("automatic",)),
    )
    groups: int = setting(
        1,
        "k, number of fixed groups of examples",
        COUNT,
        needs=("clipping", ("averaged",)),
        time="one backward pass for each group",
    )


@dataclass
class Schedules(Nested):
    """What changes over the steps: a call, a list or a file, as `settings.schedules` reads it."""

    noise: str | None = setting(
        None,
        "noise of each step within the same budget: exp(gamma=..), gd(kappa=..), momentum(kappa=.., "
        "beta=..), learning_rate(gamma=..), subsampled(gamma=..), a list or a file",
        needs=PRIVATELY,
        privacy="nothing: the same epsilon",
        time="seconds of calibration; nothing in a step",
        none="the same noise in every step",
    )
    clip: str | None = setting(
        None,
        "clip of each step: linear(END), exp(END), END the last step's factor; a list or a file",
        needs=PRIVATELY,
        privacy="nothing: the noise follows the clip",
        none="a clip that stays",
    )
    smoothing: str | None = setting(
        None, "like clip, factors of at most 1", needs=ZEROTH, none="a smoothing that stays"
    )


@dataclass
class CorrelatedNoise(Nested):
    """Noise that cancels over steps; needs fixed_batches, and with dpzero hold_direction_for."""

    kind: str = setting(
        "none",
        "how the noise of a step depends on that of steps before it",
        CORRELATIONS,
        needs=PRIVATELY,
        privacy="nothing: one Gaussian for the run, whose number of steps is fixed in advance",
        time="toeplitz and optimized: draws of all steps so far in memory, or made again in each step",
    )
    bands: int | None = setting(
        None,
        "draws that a step's noise is made of",
        COUNT,
        needs=("correlated_noise.kind", ("banded",)),
        privacy="nothing; more leave less noise in sums over steps, up to a point",
        time="8 bytes a trained coordinate and band",
        none="32",
    )
    hold_direction_for: int = setting(
        1,
        "steps that share their directions; noise may be correlated within them",
        COUNT,
        needs=ZEROTH,
        privacy="nothing; correlated noise cancels within so many steps",
        time="the run sees fewer directions",
    )

    def correlation(self, first_order: bool) -> Correlation | None:
        """The correlation as a plan has it; None for independent noise."""
        if self.kind == "none":
            return None
        bands = (self.bands or BANDS) if self.kind == "banded" else 0
        restart = 0 if first_order else self.hold_direction_for
        return Correlation(kind=self.kind, bands=bands, restart=restart)


@dataclass
class GroupRobust(Nested):
    """Training for the group that is worst off."""

    column: str | None = setting(
        None,
        "column of train_dataset with each row's group",
        TEXT,
        privacy="`group_robust.budget`; which group a row is in stays private",
        none="no group-robust training",
    )
    shares: dict[str, float] | None = setting(
        None,
        "{name: share} of all groups, public: their shares of the population; add up to 1",
        privacy="published, with the names: it must not be counted on the private rows",
        none="there is no `group_robust.column`",
    )
    weights: str = setting(
        "per_step",
        "what is released of the groups' losses: nothing (balanced), noisy losses of each step "
        "(per_step), prefix sums with correlated noise (prefix_sum), drawn groups (vertex)",
        tuple(GROUP_LOSSES),
        privacy="per_step: shares the amplified budget of the steps; prefix_sum and vertex: "
        "`sampling='fixed_batches'` or a full batch, without amplification",
    )
    loss_bound: float = setting(
        2.0,
        "b: losses are clipped to [0, b] for the groups' weights",
        POSITIVE,
        needs=RELEASED,
        privacy="nothing: noise on the groups' losses is proportional to it",
    )
    rate: float | None = setting(
        None,
        "tau of the groups' multiplicative weights, in 1 / loss",
        POSITIVE,
        needs=RELEASED,
        privacy="nothing; of vertex it follows from `group_robust.budget`",
        none="sqrt(2 log m / T) / b",
    )
    budget: float = setting(
        0.1,
        "share of the privacy budget that the groups' losses cost",
        SHARE,
        needs=RELEASED,
        privacy="the larger, the more noise on the weights, and the less on the losses",
    )
    draws: int = setting(
        1,
        "K, groups drawn in a step",
        COUNT,
        needs=("group_robust.weights", ("vertex",)),
        privacy="the more, the smaller the rate that the same budget pays for",
    )


@dataclass
class Performance(Nested):
    """Speed and memory; the same weights to the bit, or to rounding."""

    defer_updates: bool = setting(
        True,
        "make an update in the next step's first pass, or before the weights are read",
        TRUTH,
        time="saves one pass over the parameters a step",
    )
    reuse_frozen_prefix: bool = setting(
        True,
        "run frozen first layers once per batch",
        TRUTH,
        time="saves passes; keeps a microbatch's outputs of these layers",
    )
    perturbation_strategy: str = setting(
        "auto",
        "where the perturbation is during forward passes",
        STRATEGIES,
        needs=ZEROTH,
        time="the [table of the guide](guide.md#where-the-perturbation-is)",
    )
    direction_parallel_size: int | None = setting(
        None,
        "processes that share the directions of one share of the rows",
        COUNT,
        needs=ZEROTH,
        time="a process has that many times fewer directions and more rows; sends 8 B K / D bytes "
        "more a step",
        none="1, or more where rows do not fill the processes",
    )
    per_example_gradients: str = setting(
        "auto",
        "ghost: norms first, then one weighted sum of what was seen",
        ("auto", "dense", "ghost"),
        needs=("method", ("dp-sgd", "dp-adamw")),
        time="dense: memory of a gradient for each example of a microbatch; ghost: less where "
        "weights are large and sequences short",
    )


@dataclass
class InsecureTesting(Nested):
    """For tests: runs that can be repeated, and are then mostly NOT PRIVATE."""

    insecure_noise_seed: int | None = setting(
        None,
        "reproducible noise; the report then says NOT PRIVATE",
        BITS_128,
        privacy="everything: noise that is known can be subtracted",
        none="noise from the operating system's entropy",
    )
    sampler_key: str | None = setting(
        None,
        "draws the batches; not written to disk from here",
        HEX_KEY,
        privacy="everything: batches that can be known are not amplified; the report says NOT "
        "PRIVATE (but for full batches)",
        none="drawn in secret, and kept nowhere",
    )
    direction_key: int | None = setting(
        None,
        "128-bit public key of the directions",
        BITS_128,
        privacy="nothing: it is public",
        none="drawn at random",
    )
    log_private_diagnostics: bool = setting(
        False,
        "log un-noised training statistics; the report then says NOT PRIVATE",
        TRUTH,
        privacy="everything: the report says NOT PRIVATE",
        time="little",
    )

    @property
    def not_private(self) -> list[str]:
        """Names those that are set and make a report say NOT PRIVATE."""
        known = {name: value for name, value in vars(self).items() if name != "direction_key"}
        return [name for name, value in known.items() if value is not None and value is not False]


NESTED: Mapping[str, type[Nested]] = {
    "clipping_config": ClippingConfig,
    "schedules": Schedules,
    "correlated_noise": CorrelatedNoise,
    "group_robust": GroupRobust,
    "performance": Performance,
    "testing": InsecureTesting,
}
"""Field of `DPZeroConfig` -> the dataclass that it holds."""
