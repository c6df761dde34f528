"""The flat graph against the obvious: paths counted on the graph itself."""

from hypothesis import given, settings
from hypothesis import strategies as st

from keras_gradguard.diagnosis.opgraph import ALIAS, Op, OpGraph, Value


def chain(*types):
    graph, value = OpGraph(), Value("float32", (2,))
    graph.add_value("in", value)
    values = [value]
    for kind in types:
        out = Value("float32", (2,))
        op = Op(type=kind, inputs=[values[-1]], outputs=[out])
        out.op = op
        graph.add_op(op)
        values.append(out)
    return graph, values


def test_producers_and_consumers_are_nearest_first_without_aliases():
    graph, values = chain("A", ALIAS, "B", "C")
    assert [op.type for op in graph.producers(values[-1])] == ["C", "B", "A"]
    assert [op.type for op in graph.consumers(values[0])] == ["A", "B", "C"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=24))
def test_between_is_reachability_both_ways(edges):
    graph = OpGraph()
    values = [graph.add_value(i, Value("float32", ())) for i in range(8)]
    forward = {i: set() for i in range(8)}
    for a, b in edges:
        if a < b:
            graph.link(values[a], values[b])
            forward[a].add(b)

    def reach(start):
        seen, todo = {start}, [start]
        while todo:
            for b in forward[todo.pop()]:
                if b not in seen:
                    seen.add(b)
                    todo.append(b)
        return seen

    want = {i for i in reach(0) if 7 in reach(i)}
    assert graph.between([values[0]], [values[7]]) == {values[i] for i in want}


def test_cycles_end():
    graph, values = chain("A", "B")
    graph.link(values[2], values[0])
    assert graph.descendants([values[0]]) == set(values)
    assert [op.type for op in graph.producers(values[2])] == ["B", "A"]


def test_a_read_after_an_assign_takes_the_assigned_value():
    graph = OpGraph()
    handle = graph.add_value("h", Value("resource", ()))
    graph.add_variable("v", handle)
    new = graph.add_value("x", Value("float32", ()))
    stored, read = Value("float32", ()), Value("float32", ())
    before = Op(type="ReadVariableOp", inputs=[handle], outputs=[Value("float32", ())])
    assign = Op(type="AssignVariableOp", inputs=[handle, new], outputs=[stored])
    after = Op(type="ReadVariableOp", inputs=[handle], outputs=[read])
    stored.op, read.op = assign, after
    for op in (before, assign, after):
        graph.add_op(op)
    graph.connect_assigns()
    graph.connect_assigns()
    assert before.assigned == []
    assert after.assigned == [assign]
    assert after.inputs == [handle, stored]
    assert read in graph.descendants([new])
    assert graph.reads("v") == [before, after]


def test_reads_are_found_behind_renamed_handles():
    graph = OpGraph()
    outside = graph.add_value("h", Value("resource", ()))
    inside = graph.add_value("i", Value("resource", ()))
    graph.link(outside, inside)
    graph.add_variable("v", outside)
    read = graph.add_op(Op(type="ReadVariableOp", inputs=[inside], outputs=[Value("float32", ())]))
    graph.add_op(Op(type="VariableShape", inputs=[inside], outputs=[Value("int32", ())]))
    assert graph.reads("v") == [read]
