"""How good the predictions are: accuracy, macro F1 and negative log-likelihood of predictive means."""

import numpy as np

from paperlib import checks


def accuracy(probs, labels):
    """Share of the inputs whose most probable class (the first of equals) is the true one.

    Paper: Sec. exp1, "standard predictive metrics".
    Shapes: probs (N, K), labels (N,) class indices; returns a float.
    Errors: ValueError for rows that are no distributions, labels out of range, lengths that differ, no inputs.
    """
    probs, labels = _checked(probs, labels)
    return float(np.mean(probs.argmax(axis=1) == labels))


def macro_f1(probs, labels):
    """Unweighted mean over all K classes of F1 = 2 TP / (2 TP + FP + FN).

    A class that is never predicted has F1 = 0, also where it has no sample (0/0 is read as 0), so the mean is
    always over K classes and comparable between subsets, such as the retained and the full test set.

    Paper: Sec. exp1 ("macro F1"); D14.
    Shapes: probs (N, K), labels (N,) class indices; returns a float.
    Errors: ValueError for rows that are no distributions, labels out of range, lengths that differ, no inputs.
    """
    probs, labels = _checked(probs, labels)
    classes = probs.shape[1]
    predicted = probs.argmax(axis=1)
    hits = np.bincount(labels[predicted == labels], minlength=classes)
    # 2 TP + FP + FN is the number of times the class is predicted plus the number of times it is true.
    mentions = np.bincount(predicted, minlength=classes) + np.bincount(labels, minlength=classes)
    return float(np.mean(2 * hits / np.maximum(mentions, 1)))


def nll(probs, labels):
    """Mean of -log of the probability that the predictive mean gives to the true class.

    A true class with probability exactly 0 makes the mean infinite; it is never NaN and nothing is clipped.

    Paper: Sec. exp1 ("negative log-likelihood"), eq. celoss at the predictive mean; D13.
    Shapes: probs (N, K), labels (N,) class indices; returns a float, inf included.
    Errors: ValueError for rows that are no distributions, labels out of range, lengths that differ, no inputs.
    """
    probs, labels = _checked(probs, labels)
    with np.errstate(divide="ignore"):
        return float(-np.mean(np.log(probs[np.arange(len(labels)), labels])))


def _checked(probs, labels):
    probs = checks.probabilities(probs)
    return probs, checks.class_indices(labels, *probs.shape)
