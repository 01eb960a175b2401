"""The compiled loops of `dirichlet`: passes over an ensemble, special functions, and the solvers of each input.

Everything here works on C-contiguous float arrays and trusts its caller. A pass reports whether the ensemble
looked wrong; naming what is wrong is left to the caller.

Notation: `log_mean` is the mean over members of log p_k (the logarithm of the geometric mean), and `excess` is
the arithmetic minus the geometric mean of p_k. Both stay accurate when the members are nearly equal, because
`excess` is summed from phi(d) = exp(d) - 1 - d, which is never negative, and not from a difference.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Elements of a block of inputs: the running sums and one member's share of them stay in the L1/L2 cache.
BLOCK = 2048
# Elements of a block over all members, for a pass that reads the block twice.
BLOCK_ALL_MEMBERS = 32768

EULER = 0.5772156649015329
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.6931471803691238  # the leading bits of ln 2: n * LN2_HIGH is exact for the n that occur
LN2_LOW = 1.9082149292705877e-10
ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to an integer, held in the low bits
# Geometric means below exp(LOWEST) count as zero: their excess is the arithmetic mean itself.
LOWEST = -700.0
LOWEST_FINITE = -1e300  # stands for -inf where a finite reference is needed

NEWTON_LIMIT = 60
NEWTON_TOLERANCE = 1e-7  # of the last relative step; the convergence is quadratic, so the error is near its square
LARGEST_STEP = 3.0  # in log alpha
SENSITIVITY_LIMIT = 1e6  # of d log alpha_0 / d (mean log p): 1e-15 in the latter is 1e-9 in the former
EPSILON = 2.220446049250313e-16

# What alpha_0 is set to where the members determine none: beyond any spread that shows, and next to 0.
MAX_ALPHA0 = 1e100
MIN_ALPHA0 = 1e-6
ROUNDING_SPACINGS = 4.0  # a spread within this many spacings of the numbers is rounding

MEAN, MEDIAN, GEOMETRIC, TRACE = 0, 1, 2, 3
NO_SPREAD, OVERDISPERSED, CONSTANT_CLASS, ZERO_CLASS, UNDERFLOW, CLIPPED, SENSITIVE = 1, 2, 4, 8, 16, 32, 64


def compiled(**options):
    """Numba's njit with its disk cache where there is a writable folder for it, without it elsewhere."""

    def decorate(function):
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:
            return njit(nogil=True, error_model="numpy", **options)(function)

    return decorate


@intrinsic
def _bits(context, value):
    def cast(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), cast


@intrinsic
def _from_bits(context, value):
    def cast(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), cast


# ---------------------------------------------------------------------------------- passes over an ensemble


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _sums_off(a, b, c, d, tolerance):
    """Whether any row of four arrays does not sum to 1 (one with a NaN never does)."""
    off = False
    for r in range(a.shape[0]):
        w, x, y, z = -1.0, -1.0, -1.0, -1.0
        for k in range(a.shape[1]):
            w += a[r, k]
            x += b[r, k]
            y += c[r, k]
            z += d[r, k]
        near = (abs(w) <= tolerance) & (abs(x) <= tolerance) & (abs(y) <= tolerance) & (abs(z) <= tolerance)
        off |= not near
    return off


@compiled(fastmath={"contract"})
def _add_four(a, b, c, d, shift, first, second):
    """Add four members to the shifted sums and return the OR of their bits: negative if any value is."""
    bits = np.int64(0)
    for i in range(shift.size):
        w, x, y, z = np.float64(a[i]), np.float64(b[i]), np.float64(c[i]), np.float64(d[i])
        bits |= _bits(w) | _bits(x) | _bits(y) | _bits(z)
        w -= shift[i]
        x -= shift[i]
        y -= shift[i]
        z -= shift[i]
        first[i] += (w + x) + (y + z)
        second[i] += (w * w + x * x) + (y * y + z * z)
    return bits


@compiled(fastmath={"contract"})
def _add_one(a, shift, first, second):
    bits = np.int64(0)
    for i in range(shift.size):
        x = np.float64(a[i])
        bits |= _bits(x)
        x -= shift[i]
        first[i] += x
        second[i] += x * x
    return bits


@compiled()
def moments(probs, tolerance, offset, squares):
    """Fill offset (N, K), the mean less the first member, and squares, the sums of squared deviations.

    probs is (M, N, K); True if they look bad. Shifted by the first member, the sums lose at most log10(M) digits.
    """
    members, inputs, classes = probs.shape
    flat = probs.reshape(members, inputs * classes)
    flat_offset, flat_squares = offset.reshape(-1), squares.reshape(-1)
    step = max(1, BLOCK // classes) * classes
    buffers = np.empty((3, step))
    bits, off = np.int64(0), False
    for lo in range(0, flat.shape[1], step):
        hi = min(lo + step, flat.shape[1])
        shift, first, second = buffers[0, : hi - lo], buffers[1, : hi - lo], buffers[2, : hi - lo]
        for i in range(hi - lo):
            shift[i] = flat[0, lo + i]
            first[i] = 0.0
            second[i] = 0.0
        for m in range(0, members - 3, 4):
            a, b, c, d = flat[m, lo:hi], flat[m + 1, lo:hi], flat[m + 2, lo:hi], flat[m + 3, lo:hi]
            bits |= _add_four(a, b, c, d, shift, first, second)
            off |= _sums_off(
                *(a.reshape(-1, classes), b.reshape(-1, classes)),
                *(c.reshape(-1, classes), d.reshape(-1, classes), tolerance),
            )
        for m in range(members - members % 4, members):
            a = flat[m, lo:hi]
            rows = a.reshape(-1, classes)
            bits |= _add_one(a, shift, first, second)
            off |= _sums_off(rows, rows, rows, rows, tolerance)
        for i in range(hi - lo):
            flat_offset[lo + i] = first[i] / members
            flat_squares[lo + i] = max(0.0, second[i] - first[i] * flat_offset[lo + i])
    return off or bits < 0


@compiled(fastmath={"contract"})
def _phi_terms(log_probs, centre, scale, excess, probs):
    """probs = exp(log_probs), and excess += scale * phi(log_probs - centre), where scale = exp(centre).

    With d = n ln 2 + r, exp(d) - 1 - d is put together so that for n = 0 nothing but phi(r) = r^2 P(r) is left.
    """
    for i in range(centre.size):
        d = max(np.float64(log_probs[i]) - centre[i], -1e250)
        shifted = max(d, -708.0) * LOG2_E + ROUND
        n = shifted - ROUND
        r = (max(d, -708.0) - n * LN2_HIGH) - n * LN2_LOW
        phi = (r * r) * _phi_series(r)
        grown = scale[i] * _from_bits((_bits(shifted) + 1023) << 52)
        probs[i] = grown + grown * (r + phi)
        excess[i] += grown * phi + ((grown - scale[i]) * (1.0 + r) + scale[i] * (r - d))


@compiled(fastmath={"contract"})
def _phi_series(r):
    """(exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2."""
    high = 1 / 39916800 + r * (1 / 479001600 + r * (1 / 6227020800))
    middle = 1 / 5040 + r * (1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * high)))
    return 1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * middle))))


@compiled()
def log_moments(log_probs, tolerance, offset, excess):
    """Fill offset (N, K), log_mean less the finite part of the first member, and excess.

    log_probs is (M, N, K); True if they look bad.

    Each block is read twice, the second time from the cache: its mean must be known first.
    """
    members, inputs, classes = log_probs.shape
    flat = log_probs.reshape(members, inputs * classes)
    flat_offset, flat_excess = offset.reshape(-1), excess.reshape(-1)
    at_once = min(BLOCK // classes, BLOCK_ALL_MEMBERS // (members * classes))
    step = max(1, at_once) * classes
    buffers = np.empty((4, step))
    off = False
    for lo in range(0, flat.shape[1], step):
        hi = min(lo + step, flat.shape[1])
        centre, scale = buffers[0, : hi - lo], buffers[1, : hi - lo]
        total, probs = buffers[2, : hi - lo], buffers[3, : hi - lo]
        for i in range(hi - lo):
            centre[i] = max(np.float64(flat[0, lo + i]), LOWEST_FINITE)
            total[i] = 0.0
        for m in range(members):
            member = flat[m, lo:hi]
            for i in range(hi - lo):
                total[i] += member[i] - centre[i]
        for i in range(hi - lo):
            flat_offset[lo + i] = total[i] / members
            centre[i] += flat_offset[lo + i]
            off |= not (centre[i] <= tolerance)
            centre[i] = max(centre[i], LOWEST)
            scale[i] = math.exp(centre[i])
            total[i] = 0.0
        for m in range(members):
            _phi_terms(flat[m, lo:hi], centre, scale, total, probs)
            rows = probs.reshape(-1, classes)
            off |= _sums_off(rows, rows, rows, rows, tolerance)
        for i in range(hi - lo):
            flat_excess[lo + i] = max(0.0, total[i] / members)
    return off


@compiled()
def _exp_phi(centre, d):
    """exp(centre) * phi(d) without overflow, where exp(centre + d) is at most 1."""
    if abs(d) > 0.3:
        return math.exp(centre + d) - math.exp(centre) * (1.0 + d)
    return math.exp(centre) * (d * d) * _phi_series(d)


@compiled()
def merge_log_moments(reference, offset, excess, weight, other_reference, other_offset, other_excess, other_weight):
    """Merge the statistics of other members, in place; the weights are the shares of the members and sum to 1.

    log_mean is kept as reference + offset: its changes stay exact although they may be far below its own rounding.
    """
    for i in range(reference.size):
        a, b = reference[i] + offset[i], other_reference[i] + other_offset[i]
        gap = weight * excess[i] + other_weight * other_excess[i]
        if a == -math.inf or b == -math.inf:
            excess[i] = gap + weight * math.exp(a) + other_weight * math.exp(b)
            offset[i] = -math.inf
        else:
            step = (other_reference[i] - reference[i]) + (other_offset[i] - offset[i])
            offset[i] += other_weight * step
            mean = reference[i] + offset[i]
            left, right = _exp_phi(mean, -other_weight * step), _exp_phi(mean, weight * step)
            excess[i] = gap + weight * left + other_weight * right


# --------------------------------------------------------------------------------------- special functions


@compiled(fastmath={"contract"})
def _shifted(x):
    """What digamma and trigamma at x > 0 are made of, after a shift to y = x + 10 where x < 10 (else y = x).

    Returns y, chi(y) = log y - digamma(y), sum = digamma(y) - digamma(x), and tau(x) = x trigamma(x) - 1. With
    u = x (x + 9), the ten factors x, ..., x + 9 are five pairs u + j (9 - j), whose product is Q(u); the sums of
    1 / (x + j) and 1 / (x + j)^2 follow from Q and its derivatives, with one division.
    """
    y = x + 10.0 if x < 10.0 else x
    r = 1.0 / y
    v = r * r
    chi = r * 0.5 + v * (
        1 / 12 - v * (1 / 120 - v * (1 / 252 - v * (1 / 240 - v * (1 / 132 - v * (691 / 32760 - v * (1 / 12))))))
    )
    tau = r * 0.5 + v * (
        1 / 6 - v * (1 / 30 - v * (1 / 42 - v * (1 / 30 - v * (5 / 66 - v * (691 / 2730 - v * (7 / 6))))))
    )
    if x >= 10.0:
        return y, chi, 0.0, tau
    u, slope = x * (x + 9.0), 2.0 * x + 9.0
    inverse = 1.0 / (u * (40320.0 + u * (12176.0 + u * (1308.0 + u * (60.0 + u)))))
    first = (40320.0 + u * (24352.0 + u * (3924.0 + u * (240.0 + 5.0 * u)))) * inverse
    second = (24352.0 + u * (7848.0 + u * (720.0 + 20.0 * u))) * inverse
    squares = slope * slope * (first * first - second) - 2.0 * first
    return y, chi, slope * first, x * ((1.0 + tau) * r + squares) - 1.0


@compiled()
def _chi_tau(x):
    """chi(x) = log x - digamma(x) and tau(x), both positive, without cancellation for large x."""
    y, chi, climb, tau = _shifted(x)
    if x < 10.0:
        chi = (chi + math.log(x / y)) + climb
    return chi, tau


@compiled()
def _digamma_tau(x):
    y, chi, climb, tau = _shifted(x)
    return (math.log(y) - chi) - climb, tau


@compiled()
def digamma(x):
    """Digamma of x > 0; -inf at 0."""
    return _digamma_tau(x)[0] if x > 0.0 else -math.inf


@compiled()
def inverse_digamma(y):
    """The x > 0 with digamma(x) = y: Minka's start, then Newton in log x."""
    if y > 40.0:  # digamma(x) = log(x - 1/2) + O(x^-2)
        return math.exp(y) + 0.5
    if y == -math.inf:
        return 0.0
    x = math.exp(y) + 0.5 if y >= -2.22 else -1.0 / (y + EULER)
    for _ in range(8):
        value, tau = _digamma_tau(x)
        change = (y - value) / (1.0 + tau)
        x *= math.exp(change)
        if abs(change) < 1e-8:
            break
    return x


@compiled()
def inverse_digamma_all(y, x):
    for i in range(y.size):
        x[i] = inverse_digamma(y[i])


# ------------------------------------------------------------------------------------------------- solvers


@compiled()
def fixed_point(log_mean, iterations, tolerance, alpha, converged, steps, gradient_norm):
    """Algorithm 2 for each input, in place: alpha holds the start and then the result."""
    inputs, classes = alpha.shape
    for n in range(inputs):
        total = 0.0
        for k in range(classes):
            total += alpha[n, k]
        while steps[n] < iterations and not converged[n]:
            level = digamma(total)
            change, size, total = 0.0, 0.0, 0.0
            for k in range(classes):
                new = inverse_digamma(level + log_mean[n, k])
                change += (new - alpha[n, k]) ** 2
                size += alpha[n, k] ** 2
                total += new
                alpha[n, k] = new
            steps[n] += 1
            converged[n] = math.sqrt(change) < tolerance * math.sqrt(size)
        level, squared = digamma(total), 0.0
        for k in range(classes):
            if alpha[n, k] > 0.0:
                squared += (level + log_mean[n, k] - digamma(alpha[n, k])) ** 2
        gradient_norm[n] = math.sqrt(squared)


@compiled()
def _median(values):
    """Median, which sorts values in place; numpy's takes three times as long to compile as all of Algorithm 1."""
    gap = values.size // 2
    while gap > 0:
        for i in range(gap, values.size):
            moving, j = values[i], i
            while j >= gap and values[j - gap] > moving:
                values[j] = values[j - gap]
                j -= gap
            values[j] = moving
        gap //= 2
    return 0.5 * (values[(values.size - 1) // 2] + values[values.size // 2])


@compiled()
def concentration(first, offset, squares, members, epsilon, smallest, aggregate, alpha, flags):
    """Algorithm 1 from the moments, with the mean first + offset: alpha (N, K) and flags for each input.

    epsilon and smallest describe the spacing of the numbers the probabilities came in: a standard deviation within
    a few spacings is rounding, not spread.
    """
    inputs, classes = alpha.shape
    estimates = np.empty(classes)
    per_member = 1.0 / (members - 1)
    for n in range(inputs):
        mean = alpha[n]
        for k in range(classes):
            mean[k] = first[n, k] + offset[n, k]
            estimates[k] = mean[k] * (1.0 - mean[k]) / (squares[n, k] * per_member) - 1.0
        valid, flat, summed = 0, 0, 0.0
        for k in range(classes):
            floor = ROUNDING_SPACINGS * max(epsilon * mean[k], smallest)
            if squares[n, k] * per_member <= floor * floor:
                flags[n] |= ZERO_CLASS if mean[k] == 0.0 else CONSTANT_CLASS
                flat += 1
            elif estimates[k] > 0.0:
                summed += math.log(estimates[k]) if aggregate == GEOMETRIC else estimates[k]
                estimates[valid] = estimates[k]
                valid += 1
        if flat == classes:
            total = MAX_ALPHA0
        elif aggregate == TRACE:
            numerator, spread = 0.0, 0.0
            for k in range(classes):
                numerator += mean[k] * (1.0 - mean[k])
                spread += squares[n, k] * per_member
            total = numerator / spread - 1.0
        elif valid == 0:
            total = 0.0
        elif aggregate == MEDIAN:
            total = _median(estimates[:valid])
        elif aggregate == GEOMETRIC:
            total = math.exp(summed / valid)
        else:
            total = summed / valid
        if total >= MAX_ALPHA0:
            flags[n] |= NO_SPREAD
            total = MAX_ALPHA0
        elif total <= 0.0:
            flags[n] |= OVERDISPERSED
            total = MIN_ALPHA0
        for k in range(classes):
            mean[k] *= total  # in place: this is alpha


@compiled()
def maximum_likelihood(log_mean, excess, epsilon, alpha, flags, converged, steps, gradient_norm):
    """The converged maximum-likelihood alpha of each input, with what is known about it.

    Let w_k be exp(log_mean_k) made to sum to 1, and D > 0 the gap by which the geometric means fall short of the
    arithmetic ones, so that the mean of log p_k is log w_k - D. With alpha_k = s w_k exp(e_k), chi = log - digamma,
    the likelihood equations are
        F_k = e_k - chi(alpha_k) + chi(s) + D = 0    and    F_0 = sum_k w_k (exp(e_k) - 1) = 0,
    in which nothing cancels, however large s is. Newton's step for (log s, e) has an arrow matrix: each e_k is
    eliminated, and what remains is one equation H(log s) = 0. Since H + D falls like (K - 1) / (2 s), it is solved
    as log(H + D) = log D. For classes with alpha_k < 1, whose e_k is large, alpha_k itself is carried, and
    F_k = digamma(alpha_k) - digamma(s) - mean log p_k.
    """
    inputs, classes = alpha.shape
    used, large = np.empty(classes, np.int64), np.empty(classes, np.bool_)
    log_w, w, a, e = np.empty(classes), np.empty(classes), np.empty(classes), np.empty(classes)
    residual, slope, tail = np.empty(classes), np.empty(classes), np.empty(classes)
    for n in range(inputs):
        top, count, spread, arithmetic = -math.inf, 0, False, 0.0
        for k in range(classes):
            alpha[n, k] = 0.0
            arithmetic += excess[n, k]
            if log_mean[n, k] > -math.inf:
                used[count] = k
                log_w[count] = log_mean[n, k]
                top = max(top, log_mean[n, k])
                count += 1
            else:
                flags[n] |= UNDERFLOW
                spread |= excess[n, k] > 0.0
        if count == 0:
            for k in range(classes):
                alpha[n, k] = MIN_ALPHA0 / classes
            continue

        others, past_top = 0.0, False
        for j in range(count):
            w[j] = math.exp(log_w[j] - top)
            noise = ROUNDING_SPACINGS * epsilon * (1.0 - log_w[j])
            spread |= excess[n, used[j]] > 0.5 * w[j] * math.exp(top) * noise * noise
            if log_w[j] == top and not past_top:
                past_top = True
            else:
                others += w[j]
        log_others = math.log1p(others)
        geometric = math.exp(top) * (1.0 + others)
        if geometric > arithmetic:
            d = math.log1p(arithmetic / geometric)
        else:
            d = math.log(geometric + arithmetic) - top - log_others
        for j in range(count):
            log_w[j] = (log_w[j] - top) - log_others
            w[j] /= 1.0 + others

        bounded = spread and count > 1 and (count - 1) / (2.0 * d) < MAX_ALPHA0
        if not bounded:
            total = MIN_ALPHA0 if spread and count == 1 else MAX_ALPHA0
            if total == MAX_ALPHA0:
                flags[n] |= NO_SPREAD
            for j in range(count):
                alpha[n, used[j]] = w[j] * total
            continue

        s = (count - 1) / (2.0 * d)
        chi_s, tau_s = _chi_tau(s)
        level, shrink = math.log(s) - chi_s - d, math.exp(-(chi_s + d))
        for j in range(count):
            # Minka's start of the inverse digamma of level + log w; e itself, not log(a / (s w)), which would cancel.
            limit = s * w[j] * shrink
            a[j] = limit + 0.5 if limit >= 0.11 else -1.0 / (level + log_w[j] + EULER)
            large[j] = a[j] >= 1.0
            e[j] = math.log1p(0.5 / limit) - (chi_s + d) if large[j] else 0.0
        last_step, sensitivity = math.inf, 0.0
        while True:
            level = math.log(s) - chi_s - d
            balance, pull, decrease, response, squared = 0.0, 0.0, 0.0, 0.0, 0.0
            for j in range(count):
                if large[j]:
                    chi, tau = _chi_tau(a[j])
                    residual[j] = (e[j] - chi) + (chi_s + d)
                    balance += w[j] * math.expm1(e[j])
                else:
                    value, tau = _digamma_tau(a[j])
                    residual[j] = (value - level) - log_w[j]
                    balance += a[j] / s - w[j]
                slope[j] = 1.0 + tau
                tail[j] = tau - tau_s
                share = a[j] / s / slope[j]
                pull += share * residual[j]
                decrease += share * tail[j]
                response += share
                squared += residual[j] * residual[j]
            gradient_norm[n] = math.sqrt(squared)
            sensitivity = response / decrease
            converged[n] = last_step < NEWTON_TOLERANCE
            if converged[n] or steps[n] == NEWTON_LIMIT:
                break
            balance = max(balance, -0.9)
            h = max(math.log1p(balance) - pull / (1.0 + balance), -0.9 * d)
            step = math.log1p(h / d) * (d + h) * (1.0 + balance) / decrease
            step = min(max(step, -LARGEST_STEP), LARGEST_STEP)
            last_step = abs(step)
            for j in range(count):
                change = -(residual[j] + tail[j] * step) / slope[j]
                change = min(max(change, -LARGEST_STEP), LARGEST_STEP)
                e[j] += change
                a[j] *= math.exp(change + step)
                last_step = max(last_step, abs(change + step))
            s *= math.exp(step)
            chi_s, tau_s = _chi_tau(s)
            steps[n] += 1
        if sensitivity > SENSITIVITY_LIMIT:
            flags[n] |= SENSITIVE
        for j in range(count):
            alpha[n, used[j]] = a[j]
        if count < classes:
            converged[n] = False
