"""The command line: python -m paperlib COMMAND, or paperlib COMMAND."""

import argparse
import os
import sys
import time

from paperlib import config

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments=None):
    """Run one command; problems that the user can mend end in one clear message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.command(options) or 0
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        print(f"paperlib: {error}", file=sys.stderr)
        return EXIT_USAGE


def _is_for_the_user(error):
    """Errors whose message says what to do; anything else is a fault of ours and keeps its traceback."""
    names = {"ConfigError", "RecordError", "DataError", "WeightsError", "DeviceError", "UsageError"}
    return any(kind.__name__ in names for kind in type(error).__mro__)


class UsageError(ValueError):
    """Arguments that do not go together."""


def _parser():
    parser = argparse.ArgumentParser(
        prog="paperlib",
        description="Ensemble-based Dirichlet modelling: train, check data, choose loss weights.",
        epilog="Every command has its own --help.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_choose_weights(commands)
    _add_data(commands)
    return parser


def _command(commands, name, function, **texts):
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    parser.set_defaults(command=function)
    return parser


def _add_run_options(parser):
    parser.add_argument("--scale", required=True, choices=config.SCALES, help="configuration config/SCALE.yaml")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="one-thread processes that train side by side (default: one a core)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N instead of the configuration's")


# ------------------------------------------------------------------------------------------- train


def _add_train(commands):
    parser = _command(
        commands,
        "train",
        _train,
        help="train models and write their predictions",
        description="""\
Train what is missing and skip what is there: one prediction file a model,
results/SCALE/predictions/DATASET/RUN/seed_NNN.npz. A killed or interrupted run
loses at most the models in flight; the same command goes on from there, and the
seed alone decides what a model becomes.""",
        epilog="""\
examples
  paperlib train --scale demo                                   everything the scale asks for
  paperlib train --scale cpu --dataset dermamnist --recipe ce   all 50 members
  paperlib train --scale cpu --dataset aptos --recipe digamma exponential --seeds 0-4""",
    )
    _add_run_options(parser)
    parser.add_argument("--dataset", nargs="+", default=["all"], help="one or more, or all (default)")
    parser.add_argument(
        "--recipe", nargs="+", default=["all"], metavar="RUN", help="recipes or collapse runs, or all (default)"
    )
    parser.add_argument("--seeds", help="e.g. 0-9 or 0,3,7 (default: as many as the configuration says)")
    parser.add_argument(
        "--replace", action="store_true", help="train anew where a file is damaged or of another configuration"
    )
    parser.add_argument("--manifest", help="write the list of predictions with their digests to this file")


def _train(options):
    scale = config.load(options.scale)
    jobs = _selected_jobs(scale, options)
    from paperlib import records, runs

    tasks, skipped = [], 0
    settings = runs.settings_for(scale.hardware, options.device)
    for job in jobs:
        path = records.prediction_path(scale.scale, job.inputs.dataset, job.run, job.seed)
        try:
            done = records.is_done(path, job.digest)
        except records.RecordError as error:
            if not options.replace:
                raise UsageError(f"{error}\nor let --replace train it anew") from error
            done = False
        skipped += done
        if not done:
            tasks.append(runs.Task(job, str(path), settings))
    print(f"{scale.scale}: {len(jobs)} models asked for, {skipped} there, {len(tasks)} to train", flush=True)
    for spec in dict.fromkeys(job.inputs for job in jobs):
        runs.write_split(scale.scale, spec)
    failed = _run_with_progress(tasks, options.workers)
    if options.manifest and not failed:
        records.write_manifest(options.manifest, scale.scale, jobs)
    return EXIT_FAILED if failed else 0


def _selected_jobs(scale, options):
    names = list(scale.datasets) if options.dataset == ["all"] else options.dataset
    jobs = []
    for dataset in names:
        if dataset not in scale.datasets:
            scale.job(dataset, "ce", 0)  # raises, and says which datasets there are
        for run in scale.runs(dataset) if options.recipe == ["all"] else options.recipe:
            scale.job(dataset, run, 0)  # likewise for the run
            seeds = _parse_seeds(options.seeds) if options.seeds else scale.seeds(dataset, run)
            jobs += [scale.job(dataset, run, seed) for seed in seeds]
    return jobs


def _parse_seeds(text):
    try:
        seeds = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        raise UsageError(f"--seeds {text!r}: give numbers and ranges, such as 0-9 or 0,3,7") from None
    if not seeds:
        raise UsageError(f"--seeds {text!r} names no seed")
    return list(dict.fromkeys(seeds))


def _run_with_progress(tasks, workers):
    """Train tasks, a line for each as it ends with the time left; returns the failures, told at the end."""
    from paperlib import runs

    started, failed = time.monotonic(), []
    if tasks:
        runs.prepare_features(tasks, workers)
    for number, done in enumerate(runs.run(tasks, workers), start=1):
        elapsed = time.monotonic() - started
        left = elapsed / number * (len(tasks) - number)
        line = done.summary or f"FAILED: {done.error}"
        print(f"[{number}/{len(tasks)}] {done.job}: {line}; {done.seconds:.0f} s, {_clock(left)} left", flush=True)
        if done.error:
            failed.append(done)
    if failed:
        print(f"{len(failed)} of {len(tasks)} models failed:", file=sys.stderr)
        for done in failed:
            print(f"  {done.error}", file=sys.stderr)
    return failed


def _clock(seconds):
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


# ------------------------------------------------------------------------------------------- choose-weights


def _add_choose_weights(commands):
    parser = _command(
        commands,
        "choose-weights",
        _choose_weights,
        help="choose lambda_0 and lambda_EV on validation data (D03)",
        description="""\
The paper prints neither weight. One value of each serves all datasets and recipes
of a scale: the best mean rank of validation NLL over the datasets, lambda_0 with
recipe mse_clamp, lambda_EV with recipe digamma, one seed. Writes the whole grid to
results/SCALE/tables/loss_weights.csv and prints the two values; put them into
config/SCALE.yaml. Calibration and test data are not looked at.""",
    )
    _add_run_options(parser)


def _choose_weights(options):
    scale = config.load(options.scale)
    from paperlib import runs, weights

    settings = runs.settings_for(scale.hardware, options.device)
    tasks = weights.missing_tasks(scale, settings)
    print(f"{scale.scale}: {len(tasks)} models of the grid to train", flush=True)
    if _run_with_progress(tasks, options.workers):
        return EXIT_FAILED
    table, chosen = weights.choose(scale)
    path = weights.write(scale, table)
    print(table.to_string(index=False, float_format="%.4g"))
    print(f"wrote {path}")
    for name, value in chosen.items():
        current = getattr(scale.losses, name)
        note = "as configured" if value == current else f"config/{scale.scale}.yaml says {current:g}"
        print(f"{name}: {value:g} ({note})")
    return 0


# ------------------------------------------------------------------------------------------- data


def _add_data(commands):
    parser = commands.add_parser("data", help="check or fetch datasets")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = _command(
        actions,
        "check",
        _data_check,
        help="what is there: counts by class, checksum, a contact sheet",
        description="Load each dataset, verify it and write a contact sheet (PNG) to the cache folder.",
    )
    check.add_argument("dataset", nargs="*", help="names (default: all five)")
    check.add_argument("--root", help="data folder (default: PAPERLIB_DATA, else ./data)")
    fetch = _command(
        actions,
        "fetch",
        _data_fetch,
        help="download datasets and weights, verified by checksum",
        description="""\
Download what can be downloaded: the CIFARs and DermaMNIST, and for a scale with
pretrained torchvision weights those too, so that compute nodes need no network.
APTOS must be taken from Kaggle by hand; the message says what to put where.""",
    )
    fetch.add_argument("dataset", nargs="*", help="names (default: those of --scale, else all)")
    fetch.add_argument("--scale", choices=config.SCALES, help="what this scale needs, weights included")
    fetch.add_argument("--root", help="data folder (default: PAPERLIB_DATA, else ./data)")


def _data_check(options):
    from paperlib import datasets, paths

    failed = False
    for name in options.dataset or datasets.NAMES:
        try:
            summary = datasets.check(name, options.root)
        except datasets.DataError as error:
            print(f"{name}: {error}\n", file=sys.stderr)
            failed = True
            continue
        sheet = paths.cache() / "contact_sheets" / f"{name}.png"
        datasets.contact_sheet(datasets.load(name, options.root), sheet)
        print(f"{name}:")
        for key, value in summary.items():
            print(f"  {key}: {value}")
        print(f"  contact sheet: {sheet}")
    return EXIT_FAILED if failed else 0


def _data_fetch(options):
    from paperlib import datasets

    scale = config.load(options.scale) if options.scale else None
    names = options.dataset or list(scale.datasets if scale else datasets.NAMES)
    failed = False
    for name in names:
        size = scale.datasets[name].source_size if scale and name in scale.datasets else None
        try:
            print(f"{name}: {datasets.fetch(name, options.root, size)}", flush=True)
        except datasets.DataError as error:
            print(f"{name}: {error}\n", file=sys.stderr)
            failed = True
    if scale and scale.pretrained:
        from paperlib import networks

        try:
            built = networks.build(scale.network, classes=2, pretrained=True)
            print(f"weights of {scale.network}: there, sha256 {built.weights[:16]}")
        except networks.WeightsError as error:
            print(f"paperlib: {error}", file=sys.stderr)
            failed = True
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
