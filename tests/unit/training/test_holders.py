"""Which node keeps whose copies."""

import pytest

from pliant.training.holders import NO_NODE, next_node, own_node


@pytest.mark.parametrize(
    ("ranks", "others", "expected"),
    [
        (["a"], [], None),
        (["a", "a"], ["a"], None),
        (["a", "a", "b"], ["c"], "b"),
        (["c", "a", "b"], [], "b"),
        (["a"], ["a", "d", "c"], "c"),
    ],
)
def test_copies_go_to_the_next_node_with_ranks_or_else_to_another(ranks, others, expected):
    assert next_node("a", ranks, others) == expected


def test_nodes_form_a_ring():
    nodes = ["n1", "n2", "n3"]
    targets = [next_node(node, nodes, []) for node in nodes]
    assert targets == ["n2", "n3", "n1"]


def test_without_ray_there_is_one_node():
    assert own_node() == NO_NODE
