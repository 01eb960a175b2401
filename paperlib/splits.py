"""Stratified index sets: the same labels and seed give the same split on any machine and any numpy."""

import numpy as np

from paperlib import checks


def stratified(labels, fractions=(0.6, 0.2, 0.1, 0.1), seed=0, groups=None):
    """Disjoint parts (training, validation, calibration, test) that together hold every input.

    Each class's count in each part, and each part's size, is its exact share rounded up or down. Sizes are
    rounded up by largest remainder, the later of equals first, as far as the classes allow it. With `groups`
    (such as the lesion of each image) a group never straddles parts, and the counts are as near as that allows.

    Paper: Sec. exp1 (60/20/10/10 by stratified sampling); D11. `groups` is not in the paper: several images of
        one lesion in training and test are a leak that some users will want to close.
    Shapes: labels (N,) integers, groups (N,) or None; returns one sorted index array for each fraction.
    Errors: ValueError for labels that are not integers or empty, fractions that are not positive or do not sum
        to 1, a part that would be empty, groups of another length.
    """
    labels = _labels(labels)
    fractions = np.asarray(fractions, dtype=np.float64)
    if fractions.ndim != 1 or not (fractions > 0).all() or abs(fractions.sum() - 1) > 1e-9:
        raise ValueError(f"fractions must be positive and sum to 1, got {fractions.tolist()}")
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    table = _rounded_table(counts, fractions)
    if groups is None:
        order = _shuffled(codes, seed)
        part = np.empty(len(labels), dtype=np.int64)
        # Shuffled inputs stand class by class: each class deals its first ones to the first part, and so on.
        part[order] = np.repeat(np.tile(np.arange(len(fractions)), len(counts)), table.ravel())
    else:
        part = _grouped_parts(codes, groups, table, seed)
    parts = tuple(np.flatnonzero(part == p) for p in range(len(fractions)))
    for index, members in enumerate(parts):
        if len(members) == 0:
            raise ValueError(f"part {index} would be empty: {len(labels)} inputs, fractions {fractions.tolist()}")
    return parts


def subset(labels, count, seed=0):
    """Stratified subset of exactly `count` inputs, each class's share rounded up or down.

    Paper: not in the paper; the smaller scales take a stratified subset of the larger datasets.
    Shapes: labels (N,) integers; returns a sorted index array (count,).
    Errors: ValueError for labels that are not integers or empty, a count that is not an integer in 1..N.
    """
    labels = _labels(labels)
    if not isinstance(count, int | np.integer) or not 1 <= count <= len(labels):
        raise ValueError(f"count must be an integer in 1..{len(labels)}, got {count!r}")
    if count == len(labels):
        return np.arange(count)
    share = count / len(labels)
    return stratified(labels, (share, 1 - share), seed)[0]


def _labels(labels):
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be a non-empty vector of integers, got shape {labels.shape}, dtype {labels.dtype}"
        )
    return labels


def _shuffled(codes, seed):
    """Indices ordered by code, at random within a code."""
    # The raw stream of a bit generator is fixed by numpy's compatibility policy; Generator's methods are not.
    return np.lexsort((np.random.PCG64(seed).random_raw(len(codes)), codes))


def _rounded_table(counts, fractions):
    """Integer table (classes, parts): rows sum to counts; cells and column sums are exact shares rounded.

    Each part takes a unit from the classes whose share in it has a remainder. A part that finds no class with
    a unit left makes one move its unit over from another part, which then looks for a substitute: augmenting
    paths, so the units that must be dealt always can be.
    """
    # Rounded to 9 digits, so that 0.1 * 30 is the integer it stands for.
    exact = np.round(np.outer(counts, fractions), 9)
    table = np.floor(exact).astype(np.int64)
    remainder = exact - table
    spare = counts - table.sum(axis=1)
    extra = np.zeros(exact.shape, dtype=bool)
    by_remainder = np.argsort(-remainder, axis=0, kind="stable")

    def take(part, visited):
        visited.add(part)
        candidates = [k for k in by_remainder[:, part] if remainder[k, part] > 0 and not extra[k, part]]
        for k in candidates:
            if spare[k] > 0:
                spare[k] -= 1
                extra[k, part] = True
                return True
        for k in candidates:
            for other in np.flatnonzero(extra[k]):
                if other not in visited and take(other, visited):
                    extra[k, other], extra[k, part] = False, True
                    return True
        return False

    sizes = np.round(counts.sum() * fractions, 9)
    for part, size in enumerate(sizes):
        for _ in range(int(size) - table[:, part].sum()):
            take(part, set())
    for part in sorted(range(len(fractions)), key=lambda p: (sizes[p] % 1, p), reverse=True):
        if sizes[part] % 1 > 0:
            take(part, set())
    return table + extra


def _grouped_parts(codes, groups, table, seed):
    """Part of each input, whole groups at a time: large groups first, to the part that lacks the most."""
    groups = np.asarray(groups)
    checks.same_length(len(codes), len(groups), "labels", "groups")
    _, group_of = np.unique(groups, return_inverse=True)
    members = np.zeros((group_of.max() + 1, len(table)), dtype=np.int64)
    np.add.at(members, (group_of, codes), 1)
    keys = np.random.PCG64(seed).random_raw(len(members))
    lacking = table.astype(np.float64)
    part_of_group = np.empty(len(members), dtype=np.int64)
    for group in np.lexsort((keys, -members.sum(axis=1))):
        # Relative to the target, so that large groups spread over the parts as the fractions ask.
        part = np.argmax(members[group] @ (lacking / np.maximum(table, 1)))
        lacking[:, part] -= members[group]
        part_of_group[group] = part
    return part_of_group[group_of]
