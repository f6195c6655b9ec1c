"""What is cut into runs is what there was, in fewer pieces."""

from hypothesis import given
from hypothesis import strategies as st

from pe_lab.model.shape import Run, runs

stacks = st.one_of(
    st.lists(st.sampled_from("abc"), max_size=24),
    # Repeated patterns, with something before and behind: what random letters hardly ever make.
    st.tuples(
        st.lists(st.sampled_from("abc"), max_size=3),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        st.integers(1, 6),
        st.lists(st.sampled_from("abc"), max_size=3),
    ).map(lambda t: t[0] + t[1] * t[2] + t[3]),
).map(tuple)


@given(stacks)
def test_runs_spell_the_stack_out_again(stack):
    """Each run's first period, repeated, run after run, is the stack: no layer lost, doubled or moved."""
    spelled = ()
    for run in runs(stack):
        assert run.start == len(spelled) and run.period >= 1 and run.repeats >= 1
        spelled += stack[run.start : run.start + run.period] * run.repeats
    assert spelled == stack


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(2, 8))
def test_a_repeated_pattern_compiles_no_more_than_its_period(pattern, repeats):
    assert sum(run.period for run in runs(tuple(pattern * repeats))) <= len(pattern)


def test_the_patterns_people_use():
    assert runs("r" * 48) == [Run(0, 1, 48)]
    assert runs(("w", "w", "w", "f") * 12) == [Run(0, 4, 12)]
    assert runs("r" * 12 + "n" * 12) == [Run(0, 1, 12), Run(12, 1, 12)]
    assert runs("n") == [Run(0, 1, 1)]
    assert runs("abc") == [Run(0, 1, 1), Run(1, 1, 1), Run(2, 1, 1)]
    assert runs("") == []
