"""The settings of `DPZeroConfig` beside those of TrainingArguments: ranges, needs and costs."""

from __future__ import annotations

from dataclasses import dataclass

from hf_dpzero.estimators.finite_differences import DIFFERENCES
from hf_dpzero.ledger.replay import UPDATE_RULES
from hf_dpzero.perturbation.directions import DISTRIBUTIONS
from hf_dpzero.privacy.events import ACCOUNTANTS
from hf_dpzero.privacy.mechanisms.base import MOST_ROWS, RELATIONS
from hf_dpzero.privacy.sampling import SAMPLERS
from hf_dpzero.privacy.selection import WORDS
from hf_dpzero.settings.nested import (
    METHODS,
    PRIVATELY,
    ZEROTH,
    ClippingConfig,
    CorrelatedNoise,
    Given,
    GroupRobust,
    InsecureTesting,
    Performance,
    Schedules,
    part,
)
from hf_dpzero.settings.setting import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    TEXT,
    TRUTH,
    Allowed,
    setting,
)

CLIPPINGS = {
    "fixed": METHODS,
    "adaptive": ("dpzero", "dp-sgd", "dp-adamw"),
    "automatic": ("dp-sgd", "dp-adamw"),
    "averaged": ("dpzero", "dp-sgd", "dp-adamw"),
}
"""`clipping` -> the methods that it is for."""


ROWS_PER_UNIT = 4
"""`max_rows_per_unit` where a unit_column stands alone."""


@dataclass
class OwnFields:
    """Fields of `DPZeroConfig`; some replace a field or a default of TrainingArguments."""

    # Method and budget
    method: str = setting(
        "dpzero",
        "zeroth order: dpzero (scalar noise), dpgd-0th (Algorithm 1, d-dim noise), mezo (not "
        "private); first order: dp-sgd, dp-adamw, and sgd, adamw (not private)",
        METHODS,
        privacy="a step releases K numbers, d numbers, or something without noise (mezo, sgd, adamw: "
        "the report says NOT PRIVATE)",
        time="zeroth order: 2 K or K + 1 forward passes a step, memory of inference; first order: a "
        "backward pass, memory of gradients (dp-sgd, dp-adamw: each example's)",
    )
    target_epsilon: float | None = setting(
        None,
        "epsilon that the whole run may spend",
        POSITIVE,
        needs=PRIVATELY,
        privacy="the smaller, the more noise",
        none="`noise_multiplier` is given, or the method is not private",
    )
    target_delta: float | None = setting(
        None,
        "additive slack of the (epsilon, delta) bound",
        Allowed("a number in (0, 1), e.g. 1e-5; 0 with Laplace noise", lambda x: 0 <= x < 1),
        needs=PRIVATELY,
        privacy="the smaller, the more noise; well below 1 / n (a warning above)",
        none="1 / (10 n); 0 with Laplace noise",
    )
    noise_multiplier: float | None = setting(
        None,
        "noise std on the clipped sum, in clips C; instead of target_epsilon",
        NOT_NEGATIVE,
        needs=PRIVATELY,
        privacy="more noise, smaller epsilon; 0: the report says NOT PRIVATE",
        none="calibrated for `target_epsilon`",
    )
    noise_distribution: str = setting(
        "gaussian",
        "laplace is for pure epsilon (delta 0)",
        ("gaussian", "laplace"),
        privacy="laplace: delta 0, mostly at much more noise; `hf-dpzero plan` tells",
    )
    neighboring_relation: str = setting(
        "add_or_remove_one",
        "which two data sets the guarantee compares",
        RELATIONS,
        privacy="replace_one: up to twice the noise at the same epsilon; epsilons of different "
        "relations do not compare",
    )
    unit_column: str | None = setting(
        None,
        "column of train_dataset whose value says which rows are one unit of privacy: a person's, say",
        TEXT,
        privacy="the guarantee is for all rows of a value; n, q and B count values. The column's name "
        "is published",
        time="up to `max_rows_per_unit` rows for each of B units",
        none="each row is a unit",
    )
    max_rows_per_unit: int | None = setting(
        None,
        "m, most rows of a unit in a step, drawn anew in each; their mean is clipped once",
        Allowed(
            f"an integer from 1 to {MOST_ROWS}", lambda x: COUNT.holds(x) and x <= MOST_ROWS, int
        ),
        privacy="nothing; rows are clipped at C / (1 + m / 256)",
        time="in proportion to the rows of a step",
        none=f"{ROWS_PER_UNIT} where there is a `unit_column`",
    )
    accountant: str = setting(
        "pld",
        "what computes epsilon; advanced_composition is the paper's Lemma 2.2",
        ACCOUNTANTS,
        privacy="pld is tight; the others say more epsilon for the same noise",
        time="pld: seconds more for many steps",
    )
    extends_run: str | None = setting(
        None,
        "folder of a finished run to spend more on",
        PATH,
        privacy="`target_epsilon` is the total of all runs of the chain",
        none="a run of its own",
    )
    budget_file: str | None = setting(
        None,
        "file of one budget for all releases about these rows, made by `hf-dpzero budget FILE "
        "--epsilon E --delta D`",
        PATH,
        privacy="a run whose planned steps would pass the file's ceiling is refused",
        none="the report knows of this run alone",
    )
    tuning: str = setting(
        "none",
        "how the settings were chosen, for the report; public: on public data",
        WORDS,
        privacy="nothing; the report says what a search may have cost",
    )
    rows_are: str | None = setting(
        None,
        "what a row of train_dataset is; blocks: of text that examples were packed into",
        ("examples", "blocks"),
        privacy="nothing; it says what epsilon protects",
        none="an example; rows that look packed are refused until it is said",
    )
    base_is_public: bool = setting(
        False,
        "the model at the start is public, though it is not what its name says or was trained before",
        TRUTH,
        privacy="not counted: what the base has seen is yours to answer for, as the report says",
    )
    # Sampling
    expected_batch_size: float | None = setting(
        None,
        "B, the public expected logical batch size, in examples",
        POSITIVE,
        none="64; with gradient_accumulation_steps above 1, that times per_device_train_batch_size "
        "times processes",
        needs=("sampling", tuple(name for name in SAMPLERS if name != "full_batch")),
        privacy="the noise on the sum grows with q = B / n, but less than B: that on the mean falls",
        time="in proportion; no memory, see `microbatch_size`",
    )
    sampling: str = setting(
        "poisson",
        "how the rows of a step are drawn",
        tuple(SAMPLERS),
        privacy="truncated_poisson: more noise the nearer the cap is to B; "
        "fixed_size_without_replacement: much more, accounted loosely; full_batch and fixed_batches: no "
        "amplification, so far more, which `correlated_noise` pays for in a long run",
        time="full_batch: every example in every step",
    )
    max_batch_size: int | None = setting(
        None,
        "cap on a truncated_poisson batch",
        COUNT,
        privacy="the lower, the more noise",
        time="bounds a step's time",
        none="no cap",
    )
    microbatch_size: int | None = setting(
        None,
        "most examples of one forward pass",
        COUNT,
        time="a step's memory; small ones are slow, on a GPU above all",
        none="64, or 32, 16 or 1 where memory is short at the start",
    )
    max_length: int | None = setting(
        1024,
        "most tokens of a row of text (and of the model)",
        COUNT,
        privacy="nothing: rows are cut, none is dropped",
        time="time and memory",
    )
    # Clipping
    clip: float = setting(
        None,
        "bound C on one example's finite difference(s), L2 over K (L1 with Laplace noise), in loss / "
        "smoothing; dp-sgd and dp-adamw: on the norm of its gradient",
        POSITIVE,
        privacy="nothing: noise is proportional to it. Choosing it by a look at private rows is not "
        "covered",
        none="50, from where dpzero's adapts; 1 of dp-sgd and dp-adamw",
    )
    clipping: str = setting(
        None,
        "adaptive: to a private quantile; averaged: of means of groups; automatic: each gradient "
        "normalised",
        tuple(CLIPPINGS),
        privacy="adaptive: a noised count in each step, so a little more noise on the sum; averaged: "
        "sensitivity 2C",
        time="averaged: one ordinary backward pass a group",
        none="adaptive of dpzero without a given `clip` and with Gaussian noise, else fixed",
    )
    # Directions and steps
    learning_rate: float = setting(
        None,
        "rate of the first step",
        Allowed("a number in [0, 1e6]", lambda x: 0 <= x <= 1e6),
        privacy="nothing in one run; trying several on private rows does, which `hf-dpzero sweep` "
        "counts",
        none="of dpzero with Gaussian noise and `update_rule: sgd`: from noise, clip, B and T, and at "
        "most what slope and curvature of public rows' losses allow (`defaults.py`); dp-adamw 5e-4, "
        "dp-sgd 0.1, else 5e-5",
    )
    learning_rate_is_final: bool = setting(
        False,
        "a script's `learning_rate` is kept though it hardly moves a fresh head; a recipe's always is",
        TRUTH,
        needs=ZEROTH,
    )
    smoothing: float = setting(
        0.001,
        "lambda, the size of the perturbation, in units of a parameter",
        Allowed("a finite number above 0, at most 1000; try 1e-3", lambda x: 0 < x <= 1e3),
        needs=ZEROTH,
    )
    direction: str = setting(
        "rademacher",
        "distribution of the directions",
        DISTRIBUTIONS,
        needs=ZEROTH,
        time="gaussian takes longer to generate: 1.23 against 1.06 (docs/performance.md)",
    )
    num_directions: int = setting(
        None,
        "K, directions in a step",
        Allowed("an integer of 1 to 65536", lambda x: COUNT.holds(x) and x <= 1 << 16, int),
        needs=ZEROTH,
        privacy="nothing: an example's K differences are clipped as one vector. Each direction then has "
        "a smaller part of C, and the same noise",
        time="2 K forward passes a step, or K + 1 (`differences`), of what follows the first trained "
        "parameter",
        none="32 of dpzero without a given `clip` where what follows the first trained parameter costs "
        "at most a million multiplications a row (a head), fewer where more; else 1",
    )
    differences: str = setting(
        None,
        "central: (f(x + lu) - f(x - lu)) / 2l; forward: (f(x + lu) - f(x)) / l, for K > 1",
        DIFFERENCES,
        needs=ZEROTH,
        privacy="nothing",
        time="central: 2 K forward passes; forward: K + 1",
        none="forward where K is at least 4 and `smoothing` at most 0.001, else central",
    )
    update_rule: str = setting(
        "sgd",
        "optimiser on the released scalars",
        UPDATE_RULES,
        privacy="nothing",
        time="momentum: W K directions in each update instead of K",
    )
    momentum: float = setting(
        0.9,
        "beta of momentum",
        BELOW_ONE,
        needs=("update_rule", ("momentum",)),
        time="a larger one makes the default `update_window` longer",
    )
    update_window: int | None = setting(
        None,
        "W, past steps that momentum uses",
        COUNT,
        needs=("update_rule", ("momentum",)),
        time="W K directions in each update",
        none="the first W with beta^W <= 0.01",
    )
    max_grad_norm: float = setting(
        0.0,
        "first order: clips the noised gradient too (free); unused without gradients",
        NOT_NEGATIVE,
        privacy="nothing",
    )
    on_no_signal: str = setting(
        "warn",
        "if the releases cannot be told from noise after a quarter of the steps",
        ("warn", "stop", "ignore"),
        privacy="nothing. stop: the epsilon to claim is that of the whole plan",
        time="stop may end a run early",
    )
    trainable: str | None = setting(
        None,
        "regular expression; only parameters whose name it finds are trained",
        TEXT,
        privacy="dpzero: nothing; dp-sgd, dp-adamw and dpgd-0th: fewer parameters, less noise in all",
        time="layers before the first trained one run once a step",
        none="all parameters with `requires_grad`",
    )
    # Publishing
    hub_strategy: str = setting(
        "end",
        "always 'end': pushes go through the allow list of hub.push",
        privacy="nothing",
    )
    hub_private_repo: bool | None = setting(
        True,
        "make the Hub repository private",
        privacy="who may read the weights; epsilon holds whoever does",
    )
    # Nested
    clipping_config: Given[ClippingConfig] = part(ClippingConfig)
    schedules: Given[Schedules] = part(Schedules)
    correlated_noise: Given[CorrelatedNoise] = part(CorrelatedNoise)
    group_robust: Given[GroupRobust] = part(GroupRobust)
    performance: Given[Performance] = part(Performance)
    testing: Given[InsecureTesting] = part(InsecureTesting)
