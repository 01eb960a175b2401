"""Checks of arguments shared by the mathematical modules: bad input is a ValueError that says what and where."""

import numpy as np

# float16 softmax outputs of 1000 classes still sum to 1 within this; anything further off is not a distribution.
SUM_TOLERANCE = 1e-3


def choice(name, value, allowed):
    """Return value if it is one of allowed, else raise a ValueError that lists the names there are."""
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; choose one of: {', '.join(map(str, allowed))}")
    return value


def real_array(array, name, axes):
    """Array as float64 with one axis for each name in axes, none of them empty, every value finite."""
    array = np.asarray(array)
    if array.ndim != len(axes):
        raise ValueError(f"{name} must have {len(axes)} axes ({', '.join(axes)}), got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"{name} is empty: shape {array.shape}")
    if array.dtype == object or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ValueError(f"{name} must be numeric, got dtype {array.dtype}")
    array = array.astype(np.float64, copy=False)
    first_bad(~np.isfinite(array), array, name, "is not finite")
    return array


def first_bad(bad, array, name, problem):
    """Raise a ValueError naming the first True of bad (any number of axes) and the value found there."""
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        found = array[where]
        raise ValueError(f"{name}{list(where)} {problem}: {found}")


def probabilities(probs, name="probs", axes=("inputs", "classes")):
    """Probabilities as float64: finite, not negative, every vector over the last axis summing to 1."""
    probs = real_array(probs, name, axes)
    first_bad(probs < 0, probs, name, "is negative")
    sums = probs.sum(axis=-1)
    first_bad(np.abs(sums - 1) > SUM_TOLERANCE, sums, name, "does not sum to 1")
    return probs


def class_indices(labels, inputs, classes, name="labels"):
    """Labels as integer class indices: one an input, each in 0..classes-1."""
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"{name} must have 1 axis (inputs), got shape {labels.shape}")
    same_length(inputs, len(labels), "the predictions", name)
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{name} must be integer class indices, got dtype {labels.dtype}")
    first_bad((labels < 0) | (labels >= classes), labels, name, f"is outside 0..{classes - 1}")
    return labels


def same_length(expected, found, expected_name, name):
    """Raise a ValueError when two arguments that must pair up have different lengths."""
    if expected != found:
        raise ValueError(f"{name} has {found} entries, but {expected_name} has {expected}")


def finite_tensor(tensor, name, axes):
    """Smallest value of a torch tensor: one axis for each name in axes, not empty, every value finite."""
    if tensor.ndim != len(axes):
        raise ValueError(f"{name} must have {len(axes)} axes ({', '.join(axes)}), got shape {tuple(tensor.shape)}")
    if tensor.numel() == 0:
        raise ValueError(f"{name} is empty: shape {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got dtype {tensor.dtype}")
    smallest, largest = (float(extreme) for extreme in tensor.detach().aminmax())
    if not (np.isfinite(smallest) and np.isfinite(largest)):
        values = tensor.detach().double().cpu().numpy()
        first_bad(~np.isfinite(values), values, name, "is not finite")
    return smallest


def inside(value, name, low, high):
    """Value as a float strictly between low and high."""
    if not low < value < high:
        raise ValueError(f"{name} must lie strictly between {low} and {high}, got {value}")
    return float(value)
