import numpy as np
import pytest

from kourkoutas.buckets import bucket_key, by_module, partition, unique_names

NAMES = ["enc.0.weight", "enc.0.bias", "dec.weight", "gain"]
ARRAYS = [np.zeros((4, 3)), np.zeros(4), np.zeros((4, 3)), np.zeros(())]


@pytest.mark.parametrize(
    ("kind", "names", "index"),
    [
        ("parameter", tuple(NAMES), (0, 1, 2, 3)),
        ("module", ("enc.0", "dec", ""), (0, 0, 1, 2)),
        ("shape", ("(4, 3)", "(4,)", "()"), (0, 1, 0, 2)),
        ("global", ("all",), (0, 0, 0, 0)),
        (lambda name, array: array.ndim, ("2", "1", "0"), (0, 1, 0, 2)),
    ],
)
def test_parameters_fall_into_the_named_buckets(kind, names, index):
    parts = partition(kind, NAMES, ARRAYS)
    assert parts.bucket_names == names
    assert parts.bucket_of == index


def test_an_unknown_kind_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r'`buckets` must be one of .*"shape".*\'shapes\'.*did you mean "shape"'):
        partition("shapes", NAMES, ARRAYS)


def test_an_unhashable_key_names_the_parameter():
    with pytest.raises(TypeError, match="'gain'"):
        bucket_key(lambda name, array: [name], "gain", ARRAYS[3])


class Model:
    """What `by_module` asks of a torch module."""

    def __init__(self, **named):
        self.named = named

    def named_parameters(self):
        return self.named.items()


def test_buckets_by_module_go_by_the_names_that_the_model_has():
    weight, bias, gain = object(), object(), object()
    module = by_module(Model(**{"enc.0.weight": weight, "enc.0.bias": bias, "gain": gain}))
    assert [module("param_0", x) for x in (weight, bias, gain)] == ["enc.0", "enc.0", ""]
    with pytest.raises(ValueError, match=r"by_module\(Model\).*'param_7'"):
        module("param_7", object())


@pytest.mark.parametrize(
    ("names", "unique"),
    [
        (["w", "w#2", "w"], ["w", "w#2", "w#3"]),
        (["w", "w", "w#2"], ["w", "w#3", "w#2"]),
        (["w", "w", "w"], ["w", "w#2", "w#3"]),
        (["w", "w", "w#2", "w#2"], ["w", "w#3", "w#2", "w#2#2"]),
    ],
)
def test_a_name_that_occurs_again_gets_a_number_that_no_other_name_has(names, unique):
    assert unique_names(names) == unique


def test_names_and_arrays_of_different_number_are_refused():
    with pytest.raises(ValueError, match="zip"):
        partition("parameter", NAMES, ARRAYS[:2])
