"""The command line: python -m paperlib COMMAND, or paperlib COMMAND."""

import argparse
import os
import sys
import time

from paperlib import config
from paperlib.errors import UserError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments=None):
    """Run one command; problems that the user can mend end in one clear message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.command(options) or 0
    except KeyboardInterrupt:
        print("\nstopped; finished models and files are kept, the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:  # anything else is a fault of ours and keeps its traceback
        print(f"paperlib: {error}", file=sys.stderr)
        return EXIT_USAGE


class UsageError(UserError):
    """Arguments that do not go together."""


def _parser():
    parser = argparse.ArgumentParser(
        prog="paperlib",
        description="Ensemble-based Dirichlet modelling: plan, train, run notebooks, fit an ensemble of your own.",
        epilog="Every command has its own --help.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_plan(commands)
    _add_verify(commands)
    _add_choose_weights(commands)
    _add_data(commands)
    _add_notebook(commands)
    _add_index(commands)
    _add_fit(commands)
    _add_apply(commands)
    return parser


def _command(commands, name, function, **texts):
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    parser.set_defaults(command=function)
    return parser


def _add_run_options(parser):
    parser.add_argument("--scale", required=True, choices=config.SCALES, help="configuration config/SCALE.yaml")
    parser.add_argument(
        "--workers",
        type=_positive,
        help="one-thread processes that train side by side (default: one a core; on a GPU models_per_gpu)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N instead of the configuration's")


def _positive(text):
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def _load_for_training(options):
    """The configuration, its data folder made known to the processes that train; PAPERLIB_DATA goes before it."""
    scale = config.load(options.scale)
    if scale.data_folder:
        os.environ.setdefault("PAPERLIB_DATA", scale.data_folder)
    return scale


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
    parser.add_argument("--anew", action="store_true", help="train everything anew, whatever is there")
    parser.add_argument("--manifest", help="write the list of predictions with their digests to this file")


def _train(options):
    scale = _load_for_training(options)
    jobs = _selected_jobs(scale, options)
    from paperlib import records, runs

    settings = runs.settings_for(scale.hardware, options.device)
    missing = [job for job in jobs if not _is_done(scale, job, options)]
    there = len(jobs) - len(missing)
    print(f"{scale.scale}: {len(jobs)} models asked for, {there} there, {len(missing)} to train", flush=True)
    split_of = {job: records.split_path(scale.scale, job.inputs.dataset, job.run) for job in jobs}
    needed = {split_of[job]: job for job in jobs if job in missing or not split_of[job].exists()}
    for job in needed.values():
        runs.write_split(scale.scale, job)
    with runs.on_a_free_gpu(settings) as settings:
        tasks = [runs.Task(job, str(records.job_path(scale.scale, job)), settings) for job in missing]
        failed = _run_with_progress(tasks, _workers(options, scale, settings))
    if options.manifest and not failed:
        records.write_manifest(options.manifest, scale.scale, jobs)
    elif not options.manifest:
        _write_complete_manifests(scale, jobs)
    return EXIT_FAILED if failed else 0


def _is_done(scale, job, options):
    from paperlib import records

    try:
        return not options.anew and records.is_done(records.job_path(scale.scale, job), job.digest)
    except records.RecordError as error:
        if options.replace:
            return False
        raise UsageError(f"{error}\nor give your command --replace: it trains every such file anew") from error


def _write_complete_manifests(scale, jobs):
    """List what is complete as the workflow does, so that it need not look for it again."""
    from paperlib import paths, records

    for dataset, run in dict.fromkeys((job.inputs.dataset, job.run) for job in jobs):
        for name, portion in scale.portions(dataset, run).items():
            path = paths.results(scale.scale) / "manifests" / dataset / name
            if not path.exists() and all(records.job_path(scale.scale, job).exists() for job in portion):
                records.write_manifest(path, scale.scale, portion)


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
    return list(dict.fromkeys(jobs))  # a dataset or run named twice is trained once


def _parse_seeds(text):
    try:
        seeds = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            seeds += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UsageError(f"--seeds {text!r}: give numbers and ranges, such as 0-9 or 0,3,7") from None
    if not seeds:
        raise UsageError(f"--seeds {text!r} names no seed")
    return list(dict.fromkeys(seeds))


def _workers(options, scale, settings):
    return options.workers or (os.cpu_count() if settings.device == "cpu" else scale.hardware.models_per_gpu)


def _run_with_progress(tasks, workers):
    """Train tasks, a line for each as it ends with the time left; returns the failures, told at the end."""
    from paperlib import runs

    started, failed = time.monotonic(), []
    if tasks:
        runs.check_places(tasks)
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


# ------------------------------------------------------------------------------------------- plan


def _add_plan(commands):
    parser = _command(
        commands,
        "plan",
        _plan,
        help="what a scale costs: models, steps, images, disk, memory, hours",
        description="""\
Count what a scale asks for, by dataset and stage, less what is there already. Hours
come from a training speed that you state (--rate) or that is timed here (--measure:
a few steps on random images, on the device that would train).""",
        epilog="""\
examples
  paperlib plan --scale paper                         the work alone
  paperlib plan --scale paper --rate 1500 --parallel 4    hours on four GPUs with 1,500 images/s each
  paperlib plan --scale cpu --measure                 hours on this machine, one process a core""",
    )
    parser.add_argument("--scale", required=True, choices=config.SCALES, help="configuration config/SCALE.yaml")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--rate", type=_positive, help="training images/s of one GPU (of one process on a CPU)")
    speed.add_argument("--measure", action="store_true", help="time a few steps here")
    parser.add_argument(
        "--parallel", type=_positive, help="GPUs, or processes on a CPU (default: as many as this machine has)"
    )
    parser.add_argument("--device", help="for --measure: cpu, cuda or cuda:N instead of the configuration's")


def _plan(options):
    scale = config.load(options.scale)
    from paperlib import plan, runs

    device = options.device or scale.hardware.device
    parallel = options.parallel or runs.processes_here(device)
    work = plan.table(scale)
    rates, note = {}, "give --rate or --measure for an estimate of hours"
    if options.rate:
        rates = dict.fromkeys(zip(work.network, work.image_size, strict=True), options.rate)
        note = f"hours: {parallel} in parallel, each with {options.rate:,} training images/s"
    if options.measure:
        rates, peak = plan.measure(scale, runs.settings_for(scale.hardware, device))
        speeds = ", ".join(f"{network} at {size} px {rate:,.0f}" for (network, size), rate in rates.items())
        note = f"hours: {parallel} in parallel; training images/s of one, timed here: {speeds}\n"
        note += f"memory: the timed process took {peak:.1f} GB at most, without a dataset's images"
    print(plan.text(scale, plan.with_hours(work, rates, parallel) if rates else work))
    print(note)


# ------------------------------------------------------------------------------------------- verify


def _add_verify(commands):
    parser = _command(
        commands,
        "verify",
        _verify,
        help="train some released models anew and compare them with what is stored",
        description="""\
Pick models at random among the stored predictions of each dataset, train them anew in a
temporary folder and compare. On the hardware and versions of the provenance the result must
be the same bit by bit, elsewhere within the tolerance that is printed. Nothing stored changes.""",
    )
    _add_run_options(parser)
    parser.add_argument("--dataset", nargs="+", default=["all"], help="one or more, or all (default)")
    parser.add_argument("--models", type=_positive, default=3, help="models of each dataset (default: 3)")
    parser.add_argument("--draw", type=int, default=0, help="seed of the random choice (default: 0)")


def _verify(options):
    scale = _load_for_training(options)
    from paperlib import runs, verify

    names = list(scale.datasets) if options.dataset == ["all"] else options.dataset
    for name in names:
        scale.job(name, "ce", 0)  # raises for an unknown dataset, and says which there are
    jobs = verify.choose(scale, names, options.models, options.draw)
    print(f"{scale.scale}: training {len(jobs)} released models anew", flush=True)
    good = 0
    with runs.on_a_free_gpu(runs.settings_for(scale.hardware, options.device)) as settings:
        for result in verify.retrain(scale, jobs, settings, _workers(options, scale, settings)):
            print(result.error if isinstance(result, runs.Done) else result, flush=True)
            good += isinstance(result, verify.Comparison) and result.good
    print(f"{good} of {len(jobs)} are as released")
    return 0 if good == len(jobs) else EXIT_FAILED


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
    scale = _load_for_training(options)
    from paperlib import runs, weights

    with runs.on_a_free_gpu(runs.settings_for(scale.hardware, options.device)) as settings:
        tasks = weights.missing_tasks(scale, settings)
        print(f"{scale.scale}: {len(tasks)} models of the grid to train", flush=True)
        if _run_with_progress(tasks, _workers(options, scale, settings)):
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
    for name in _known_datasets(options.dataset) or datasets.NAMES:
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


def _known_datasets(names):
    from paperlib import datasets

    for name in names:
        if name not in datasets.NAMES:
            raise UsageError(f"unknown dataset {name!r}; choose one of: {', '.join(datasets.NAMES)}")
    return names


def _data_fetch(options):
    from paperlib import datasets

    scale = config.load(options.scale) if options.scale else None
    names = _known_datasets(options.dataset) or list(scale.datasets if scale else datasets.NAMES)
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


# ------------------------------------------------------------------------------------------- fit and apply


def _add_prediction_options(parser):
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="folder for the results")
    parser.add_argument(
        "--kind", choices=("probs", "log_probs", "logits"), help="what the numbers are (default: recognised)"
    )
    parser.add_argument(
        "--labels", metavar="NAME", help="array, column or file of true classes (default: labels, label)"
    )
    parser.add_argument("--ids", metavar="NAME", help="array, column or file of input names (default: ids, id)")
    parser.add_argument("--class-names", metavar="NAMES", help="a,b,c or a file with one name a line")


def _add_fit(commands):
    parser = _command(
        commands,
        "fit",
        _fit,
        help="your own ensemble: Dirichlets, uncertainty, a threshold with a guarantee, a report",
        description="""\
From the predictions of several trained models to a Dirichlet for each input, a
ranking, and a threshold below which the classifier may act alone. PREDICTIONS is
one .npz or .npy of shape (members, inputs, classes), or one .npy, .csv or .parquet
a member. Writes to OUT: inputs.csv, inputs.parquet, policy.json, report.html.
docs/own-ensemble.md describes formats, thresholds and files.""",
        epilog="""\
examples
  paperlib fit predictions.npz -o out                      labels and split inside the .npz
  paperlib fit member_*.csv --labels labels.csv -o out --risk 0.05
  paperlib fit logits.npy --kind logits --labels y.npy --split is_calibration.npy -o out
  paperlib fit predictions.npz -o out --coverage 0.8       which risk comes with that coverage?""",
    )
    parser.add_argument("predictions", nargs="+", metavar="PREDICTIONS")
    _add_prediction_options(parser)
    parser.add_argument(
        "--split", metavar="NAME", help="array, column or file: calibration / test, or a mask of calibration inputs"
    )
    parser.add_argument("--estimator", choices=("mom", "mle"), default="mom", help="moments (default) or likelihood")
    parser.add_argument(
        "--aggregate",
        choices=("mean", "median", "geometric", "trace"),
        default="mean",
        help="class-wise alpha_0 to one, for mom (default: mean)",
    )
    parser.add_argument(
        "--order",
        choices=("total_variance", "mutual_information", "entropy", "least_confidence"),
        default="total_variance",
        help="what is large where the classifier should abstain (default: total_variance)",
    )
    parser.add_argument("--risk", type=float, default=0.1, help="error rate allowed among kept inputs (default: 0.1)")
    parser.add_argument("--delta", type=float, default=0.1, help="how often the promise may fail (default: 0.1)")
    parser.add_argument(
        "--threshold", choices=("guaranteed", "empirical"), help="which one decides (default: guaranteed)"
    )
    parser.add_argument("--coverage", type=float, help="keep this share instead, and say the risk that comes with it")
    parser.add_argument(
        "--temperature", action="store_true", help="fit a temperature to the confidence; decisions stay the same"
    )


def _fit(options):
    from paperlib import ensembles, policy, report

    if options.coverage is not None and options.threshold:
        raise UsageError("--coverage sets the threshold itself; leave out --threshold, or --coverage")
    ensembles.check_output(options.output)
    ensemble = ensembles.read(
        *(options.predictions, options.kind, options.labels, options.split, options.ids, options.class_names)
    )
    print("\n".join(ensemble.notes), flush=True)
    fitted = policy.fit(
        ensemble,
        **{name: getattr(options, name) for name in ("estimator", "aggregate", "order", "risk", "delta", "coverage")},
        threshold=options.threshold or "guaranteed",
        temperature=options.temperature,
        progress=_with_bar,
    )
    with ensembles.output_folder(options.output) as folder:
        ensembles.write_table(folder, ensemble, fitted.decisions)
        policy.save(fitted.policy, folder / "policy.json")
        summary = report.write(folder / "report.html", fitted, ensemble)
    print(f"\n{summary.headline} {summary.more}".rstrip())
    for note in summary.notes:
        print(note)
    for warning in summary.warnings:
        print(f"warning: {warning}")
    print(f"wrote {options.output}: {', '.join(ensembles.OUTPUTS)}")


def _add_apply(commands):
    parser = _command(
        commands,
        "apply",
        _apply,
        help="decide on new predictions of an ensemble by a policy of paperlib fit",
        description="""\
Read new predictions of the same members and classes, in the same forms as for
paperlib fit, and write OUT/inputs.csv and OUT/inputs.parquet with the policy's
decisions. Nothing is fitted.""",
        epilog="example\n  paperlib apply out/policy.json new.npz -o new_out",
    )
    parser.add_argument("policy", metavar="POLICY.json")
    parser.add_argument("predictions", nargs="+", metavar="NEW")
    _add_prediction_options(parser)


def _apply(options):
    from paperlib import ensembles, policy

    ensembles.check_output(options.output)
    rule = policy.load(options.policy)
    ensemble = ensembles.read(
        options.predictions,
        options.kind,
        options.labels,
        ids=options.ids,
        class_names=options.class_names,
        default_kind=rule.kind,
    )
    print("\n".join(ensemble.notes), flush=True)
    decisions = policy.apply(rule, ensemble, _with_bar)
    with ensembles.output_folder(options.output) as folder:
        ensembles.write_table(folder, ensemble, decisions)
    if decisions.kept is None:
        print("the policy has no threshold: ranking only")
    else:
        print(f"kept {decisions.kept.sum():,} of {len(decisions.kept):,} inputs. Promise: {rule.promise}")
    print(f"wrote {options.output}: {', '.join(ensembles.OUTPUTS[:2])}")


def _with_bar(blocks):
    from tqdm import tqdm

    return tqdm(blocks, desc="inputs", unit="block", disable=len(blocks) < 2)


# ------------------------------------------------------------------------------------------- notebook, index


def _add_notebook(commands):
    parser = _command(
        commands,
        "notebook",
        _notebook,
        help="run one notebook for one dataset and make its page",
        description="""\
Execute notebooks/NAME.ipynb with papermill. The executed notebook and its page go to
results/SCALE/notebooks/, figures to figures/SCALE/DATASET/, tables to
results/SCALE/tables/DATASET/. A failed one keeps what it got to below logs/.""",
    )
    parser.add_argument("name", help="such as exp3_selective_classification")
    parser.add_argument("--scale", required=True, choices=config.SCALES)
    parser.add_argument("--dataset", required=True)


def _notebook(options):
    scale = config.load(options.scale)
    from paperlib import catalogue, notebooks, paths

    if options.dataset != catalogue.ALL:
        scale.job(options.dataset, "ce", 0)  # raises for an unknown dataset, and says which there are

    started = time.monotonic()
    executed = notebooks.run(options.name, options.scale, options.dataset)
    print(f"{executed.relative_to(paths.root())}: {time.monotonic() - started:.0f} s")
    return 0


def _add_index(commands):
    parser = _command(
        commands,
        "index",
        _index,
        help="write the page that lists every figure and table of a scale",
        description="""\
Map every figure and table of the paper to its files and its notebook: index.html and index.md.
For the released scale, the numbers in README.md and docs/ are brought up to date with its tables.""",
    )
    parser.add_argument("--scale", required=True, choices=config.SCALES)
    parser.add_argument("shown", nargs="*", metavar="NOTEBOOK:DATASET", help="default: all that the scale asks for")


def _index(options):
    scale = config.load(options.scale)
    from paperlib import catalogue, notebooks, showcase

    pairs = [tuple(pair.split(":")) for pair in options.shown] or catalogue.notebooks(scale)
    entries = [
        {
            "title": item.title,
            "label": item.label(dataset),
            "dataset": dataset,
            "name": "all datasets" if dataset == catalogue.ALL else catalogue.title(dataset),
            "notebook": notebook,
            "page": f"{notebook}-{dataset}.html",
            "files": item.files(options.scale, dataset),
            "picture": f"../../../{item.files(options.scale, dataset)[-1]}" if item.kind == "figure" else None,
        }
        for notebook, dataset in pairs
        for item in catalogue.ITEMS
        if item.notebook == notebook
    ]
    print(notebooks.write_index(options.scale, entries))
    showcase.write(options.scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
