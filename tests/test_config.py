"""The configuration: what it accepts, what its errors say, and what makes two jobs the same model."""

import copy
import dataclasses
import re

import pytest
import yaml
from conftest import REPOSITORY, change_config

from paperlib import config, datasets, losses, networks
from paperlib.recipes import EVIDENTIAL, RECIPES

SCHEMA = yaml.safe_load((REPOSITORY / "config" / "schema.yaml").read_text())


def content(scale="demo"):
    return yaml.safe_load((REPOSITORY / "config" / f"{scale}.yaml").read_text())


def edited(change, scale="demo"):
    changed = content(scale)
    change(changed)
    return config.parse(changed, f"{scale}.yaml")


def digests(scale):
    """Digest of every job, by dataset, run and seed."""
    return {
        (dataset, run, job.seed): job.digest
        for dataset in scale.datasets
        for run in scale.runs(dataset)
        for job in scale.jobs(dataset, run)
    }


def runs_that_change(scale, **overrides):
    """Runs whose digest differs when the configuration is loaded with overrides."""
    before, after = digests(config.load(scale)), digests(config.load(scale, overrides))
    return {run for (dataset, run, seed), digest in before.items() if after[dataset, run, seed] != digest}


# ---------------------------------------------------------------- schema, dataclasses and files stay aligned


@pytest.mark.parametrize("scale", config.SCALES)
def test_every_shipped_configuration_loads(scale):
    loaded = config.load(scale)
    assert loaded.scale == scale
    for dataset in loaded.datasets:
        for run in loaded.runs(dataset):
            jobs = loaded.jobs(dataset, run)
            assert [job.seed for job in jobs] == list(range(len(jobs)))
            assert len({job.digest for job in jobs}) == len(jobs)


SECTIONS = {
    config.Scale: SCHEMA,
    config.Split: SCHEMA["properties"]["split"],
    config.Training: SCHEMA["$defs"]["training"],
    config.Losses: SCHEMA["$defs"]["losses"],
    config.Analysis: SCHEMA["properties"]["analysis"],
    config.Collapse: SCHEMA["properties"]["collapse"],
    config.Hardware: SCHEMA["properties"]["hardware"],
    config.DatasetConfig: next(iter(SCHEMA["properties"]["datasets"]["patternProperties"].values())),
}


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_schema_and_dataclass_have_the_same_fields(kind):
    section = SECTIONS[kind]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert set(section["properties"]) == set(fields)
    no_default = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert set(section.get("required", ())) == no_default
    assert section["additionalProperties"] is False


def names_in(pattern):
    return tuple(re.fullmatch(r"\^\((.*)\)\$", pattern).group(1).split("|"))


def test_schema_lists_the_names_the_code_knows():
    properties = SCHEMA["properties"]
    assert tuple(properties["scale"]["enum"]) == config.SCALES
    assert set(properties["network"]["enum"]) == set(networks.SPECS)
    assert tuple(properties["views"]["items"]["enum"]) == datasets.VIEWS
    assert tuple(SCHEMA["$defs"]["schedule"]["enum"]) == losses.SCHEDULES
    assert names_in(next(iter(properties["recipes"]["patternProperties"]))) == tuple(RECIPES)
    assert names_in(next(iter(properties["datasets"]["patternProperties"]))) == datasets.NAMES
    assert tuple(name for name, spec in networks.SPECS.items() if spec.frozen_trunk) == config.FROZEN_TRUNK


def test_what_one_recipe_may_change_are_fields_of_a_job():
    recipe = next(iter(SCHEMA["properties"]["recipes"]["patternProperties"].values()))
    assert set(recipe["properties"]) <= {field.name for field in dataclasses.fields(config.Job)}


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("place", "misspelt", "nearest"),
    [
        ((), "datsets", "datasets"),
        ((), "netwrok", "network"),
        (("training",), "epoch_ce", "epochs_ce"),
        (("losses",), "lamda0", "lambda0"),
        (("datasets",), "cifar_100", "cifar100"),
        (("datasets", "digits"), "member", "members"),
        (("hardware",), "model_per_gpu", "models_per_gpu"),
        (("collapse", "runs", "no_kl"), "kl_shedule", "kl_schedule"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_valid_one(place, misspelt, nearest):
    def change(changed):
        for key in place:
            changed = changed[key]
        changed[misspelt] = 1

    with pytest.raises(config.ConfigError) as error:
        edited(change)
    where = ".".join(place) or "top level"
    assert str(error.value) == f"demo.yaml: unknown key {misspelt!r} in {where}; did you mean {nearest!r}?"


def test_a_misspelt_recipe_is_named():
    with pytest.raises(config.ConfigError, match="unknown key 'mse_clam' in recipes; did you mean 'mse_clamp'"):
        edited(lambda c: c.update(recipes={"mse_clam": {"epochs": 3}}))


def test_a_bad_run_name_is_named_and_the_good_ones_are_not():
    with pytest.raises(config.ConfigError) as error:
        edited(lambda c: c["collapse"]["runs"].update({"No-KL": {"kl_schedule": "none"}}))
    assert "unknown key 'No-KL' in collapse.runs" in str(error.value)
    assert "annealed" not in str(error.value)


def test_all_problems_are_told_at_once():
    def change(changed):
        changed["training"]["batch_size"] = 0
        changed["losses"]["lambda0"] = -1
        changed["colapse"] = 1

    with pytest.raises(config.ConfigError) as error:
        edited(change)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert all(any(key in line for line in lines) for key in ("training.batch_size", "losses.lambda0", "'colapse'"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("losses"), "'losses' is a required property"),
        (lambda c: c["training"].update(keep="best"), "training.keep: 'best' is not one of"),
        (lambda c: c["split"].update(fractions=[0.6, 0.2, 0.1, 0.2]), "must sum to 1"),
        (lambda c: c["collapse"].update(dataset="aptos"), "'aptos' is not one of this scale's datasets"),
        (lambda c: c["ensemble"].update(sizes=[2, 21]), "asks for 21 members, but datasets.digits.members is 20"),
        (lambda c: c.update(views=["plain"]), "views are for a network with a frozen trunk, which tiny has not"),
    ],
)
def test_values_that_cannot_be_used(change, message):
    with pytest.raises(config.ConfigError, match=re.escape(message)):
        edited(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(views=["flip"]), "views must include 'plain'"),
        (lambda c: c.update(views=["plain", "flp"]), "'flp' is not one of"),
        (lambda c: c.pop("views"), "it needs views and pretrained: true"),
        (lambda c: c.update(pretrained=False), "it needs views and pretrained: true"),
    ],
)
def test_a_frozen_trunk_needs_its_views(change, message):
    with pytest.raises(config.ConfigError, match=re.escape(message)):
        edited(change, "cpu")


def test_what_is_not_there_or_no_yaml_is_named(home):
    with pytest.raises(config.ConfigError, match="unknown scale 'big'; choose one of: demo, cpu, paper"):
        config.load("big")
    (home / "config" / "cpu.yaml").write_text("training: [1,\n")
    with pytest.raises(config.ConfigError, match=r"cpu\.yaml is not valid YAML"):
        config.load("cpu")
    (home / "config" / "cpu.yaml").write_text("- 1\n")
    with pytest.raises(config.ConfigError, match=r"cpu\.yaml must be a mapping"):
        config.load("cpu")
    (home / "config" / "paper.yaml").unlink()
    with pytest.raises(config.ConfigError, match=r"paper\.yaml is missing: .* set PAPERLIB_HOME"):
        config.load("paper")


def test_a_job_of_an_unknown_dataset_or_run_lists_those_there_are():
    scale = config.load("demo")
    with pytest.raises(config.ConfigError, match="scale demo has no dataset 'cifar10'; it has: digits"):
        scale.job("cifar10", "ce", 0)
    with pytest.raises(config.ConfigError, match=r"digits has no run 'mse' at scale demo; it has: ce, mse_only"):
        scale.job("digits", "mse", 0)


# ---------------------------------------------------------------- jobs and digests


def test_members_seeds_analysis_and_hardware_change_no_digest():
    unchanged = {
        "datasets": {"digits": {"members": 30, "seeds": 7}},
        "analysis": {"bins": 15, "risk": 0.05},
        "ensemble": {"sizes": [2, 3]},
        "hardware": {"device": "cuda", "amp": False, "deterministic": True, "models_per_job": 3},
    }
    assert runs_that_change("demo", **unchanged) == set()


COLLAPSE_WITH_OWN_LAMBDA = {"collapse_constant_one"}
COLLAPSE_WITHOUT_LAMBDA = {"collapse_no_kl"}
COLLAPSE = {"collapse_" + name for name in content()["collapse"]["runs"]}
OTHER_SPLITS = {"split_1", "split_2"}
KL_RECIPES = {"mse_clamp", "mse_softadapt", "mse_plusone", "exponential"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"losses": {"lambda_ev": 0.5}}, {"digamma"}),
        (
            {"losses": {"lambda0": 0.5}},
            KL_RECIPES | COLLAPSE - COLLAPSE_WITH_OWN_LAMBDA - COLLAPSE_WITHOUT_LAMBDA,
        ),
        ({"losses": {"kl_schedule": "constant"}}, KL_RECIPES),
        ({"training": {"epochs_ce": 11}}, {"ce", *OTHER_SPLITS}),
        ({"training": {"epochs_edl": 11}}, set(EVIDENTIAL)),
        ({"recipes": {"mse_clamp": {"epochs": 11}}}, {"mse_clamp"}),
        ({"recipes": {"ce": {"lambda0": 11}}}, set()),
        ({"collapse": {"epochs": 11}}, COLLAPSE),
        ({"collapse": {"runs": {"no_kl": {"kl_schedule": "none", "lambda0": 7}}}}, set()),
        ({"training": {"batch_size": 16}}, set(RECIPES) | COLLAPSE | OTHER_SPLITS),
        ({"training": {"lr_backbone": 0.5}}, set(RECIPES) | OTHER_SPLITS),
        ({"split": {"seed": 5}}, set(RECIPES) | COLLAPSE),
        ({"datasets": {"digits": {"subset": 500}}}, set(RECIPES) | COLLAPSE | OTHER_SPLITS),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_digest_changes_exactly_where_the_model_does(overrides, expected):
    assert runs_that_change("demo", **overrides) == expected


def test_warmup_does_not_read_lambda0():
    scale = {"losses": {"kl_schedule": "warmup"}}
    jobs = [config.load("demo", scale | {"losses": scale["losses"] | {"lambda0": value}}) for value in (0.1, 3.0)]
    assert jobs[0].job("digits", "mse_clamp", 0).digest == jobs[1].job("digits", "mse_clamp", 0).digest


def test_a_digest_is_stable_and_different_for_all_jobs():
    all_digests = [digest for scale in config.SCALES for digest in digests(config.load(scale)).values()]
    assert len(set(all_digests)) == len(all_digests)
    # Released predictions are found by their digest: fields of a Job cannot change without a thought of them.
    assert {field.name for field in dataclasses.fields(config.Job)} == {
        *("inputs", "run", "recipe", "seed", "pretrained", "epochs", "batch_size", "lr_backbone", "lr_head"),
        *("weight_decay", "keep", "kl_schedule", "lambda0", "lambda_ev"),
    }


def test_a_collapse_run_is_mse_clamp_from_random_initialisation():
    scale = config.load("cpu")
    job = scale.job("cifar100", "collapse_flipped", 0)
    assert (job.recipe, job.pretrained, job.inputs.network, job.inputs.views) == (
        "mse_clamp",
        False,
        "compact_resnet",
        None,
    )
    assert job.lr_backbone == job.lr_head == scale.training.lr_head
    assert (job.kl_schedule, job.lambda0) == ("flipped", scale.losses.lambda0)
    assert "collapse_flipped" not in scale.runs("aptos")


def test_another_split_is_cross_entropy_with_another_split_seed():
    scale = config.load("cpu")
    job, plain = scale.job("dermamnist", "split_2", 3), scale.job("dermamnist", "ce", 3)
    moved = dataclasses.replace(plain.inputs, split=dataclasses.replace(plain.inputs.split, seed=2))
    assert job == dataclasses.replace(plain, run="split_2", inputs=moved)
    assert "split_2" not in scale.runs("aptos")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "aptos"}, "split_sensitivity.dataset 'aptos' is not one of this scale's datasets"),
        ({"seeds": [0, 1]}, "split_sensitivity.seeds has split.seed 0: name other splits"),
    ],
)
def test_other_splits_must_fit_the_scale(change, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load("demo", {"split_sensitivity": change})


def test_seeds_of_each_kind_of_run():
    scale = config.load("cpu")
    assert scale.seeds("dermamnist", "split_1") == range(10)
    assert scale.seeds("cifar10", "ce") == range(100)
    assert scale.seeds("cifar10", "digamma") == range(10)
    assert scale.seeds("cifar100", "collapse_no_kl") == range(1)


def test_the_protocol_of_the_paper():
    scale = config.load("paper")
    ce, edl = scale.job("cifar10", "ce", 0), scale.job("cifar10", "digamma", 0)
    assert (ce.epochs, edl.epochs, ce.batch_size) == (20, 30, 32)
    assert (ce.lr_backbone, ce.lr_head, ce.weight_decay, ce.keep) == (1e-4, 1e-3, 1e-4, "last")
    assert (ce.inputs.network, ce.inputs.image_size, ce.pretrained) == ("resnet18", 224, True)
    assert scale.split.fractions == (0.6, 0.2, 0.1, 0.1)


def test_overrides_replace_single_values_and_are_checked(home):
    loaded = config.load("demo", {"training": {"batch_size": 8}})
    assert loaded.training.batch_size == 8
    assert loaded.training.epochs_ce == 2
    with pytest.raises(config.ConfigError, match="unknown key 'batchsize' in training; did you mean 'batch_size'"):
        config.load("demo", {"training": {"batchsize": 8}})
    change_config(home, "demo", lambda c: c["training"].update(batch_size=4))
    assert config.load("demo").training.batch_size == 4


def test_parsing_leaves_its_input_alone():
    given = content("cpu")
    before = copy.deepcopy(given)
    config.parse(given, "cpu.yaml")
    assert given == before
