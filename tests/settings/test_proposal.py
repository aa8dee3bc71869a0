"""K, B and T for the time at hand."""

import json
import math

import pytest

from hf_dpzero.cli.main import main
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.settings import proposal
from hf_dpzero.settings.proposal import propose

BUDGET = {"epsilon": 2.0, "delta": 1e-5}


def passes(k: int) -> int:
    return 2 * k if k < 4 else k + 1


@pytest.mark.parametrize(
    ("n", "batch", "steps", "epsilon"), [(65_349, 512, 4000, 2.0), (1024, 100, 300, 0.5)]
)
def test_the_noise_to_rank_by_is_nearly_the_accountants(n, batch, steps, epsilon):
    rough = proposal._noise_multiplier(
        proposal._gaussian_parameter(epsilon, 1e-5), batch / n, steps
    )
    mechanism = ScalarMechanism(clip=1.0, noise_multiplier=1.0, expected_batch_size=batch)
    sampler = PoissonSampler(num_examples=n, expected_batch_size=batch)
    plan = PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=steps)
    exact = plan.calibrate(epsilon=epsilon, delta=1e-5).mechanism.noise_multiplier
    assert 0.85 < rough / exact < 1.15


def test_time_buys_steps_directions_and_rows():
    """What gains most changes in the way that the formula says: first steps, then all three."""
    short = propose(65_349, **BUDGET, minutes=10, rows_per_second=50, passes=passes)
    long = propose(65_349, **BUDGET, minutes=10, rows_per_second=50_000, passes=passes)
    assert short.max_steps * passes(short.num_directions) * short.expected_batch_size <= 30_000
    assert long.num_directions > short.num_directions
    assert long.expected_batch_size > short.expected_batch_size
    assert 9 < short.minutes <= 10 and 9 < long.minutes <= 10


def test_few_rows_and_a_small_budget_take_larger_batches():
    """There the noise is what is lost, which falls with B^2 and grows with B below its square root."""
    settings = {"minutes": 60, "rows_per_second": 1000, "passes": passes, "delta": 1e-5}
    small = propose(1024, epsilon=0.25, **settings)
    large = propose(1024, epsilon=math.inf, **settings)
    assert small.expected_batch_size > large.expected_batch_size


def test_what_is_given_stays():
    chosen = propose(
        1024, **BUDGET, minutes=10, rows_per_second=1000, passes=passes, directions=3, batch=100
    )
    assert chosen[:2] == (3, 100)
    assert chosen.max_steps == 600 * 1000 // (6 * 100 + 10)  # 10 rows are 0.01 s


def test_too_little_time_is_refused():
    with pytest.raises(ValueError, match="0.1 minutes at 1 rows a second are fewer than 20 steps"):
        propose(1024, **BUDGET, minutes=0.1, rows_per_second=1, passes=passes)


def test_the_command_plans_what_it_proposes(capsys):
    command = "plan --num_examples 5000 --target_epsilon 2 --propose 10 --rows_per_second 1000"
    main(f"{command} --num_directions 4 --json".split())
    told = json.loads(capsys.readouterr().out)
    chosen = propose(5000, 2.0, 0.1 / 5000, 10, 1000, passes, directions=4)
    assert (told["num_directions"], told["expected_batch_size"], told["steps"]) == chosen[:3]
    assert told["epsilon"] <= 2.0 and told["learning_rate"] > 0


def test_steps_beside_a_proposal_are_refused(capsys):
    command = "plan --num_examples 5000 --target_epsilon 2 --propose 5 --rows_per_second 50"
    assert main(f"{command} --max_steps 10".split()) == 2
    assert "max_steps=10 is what --propose chooses" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["--propose 10", "--rows_per_second 5", "--propose 0 --rows_per_second 5"]
)
def test_half_of_a_proposal_is_refused(given, capsys):
    assert main(f"plan --num_examples 5000 --target_epsilon 2 {given}".split()) == 2
    assert "both are needed, above 0" in capsys.readouterr().err
