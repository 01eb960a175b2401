"""Released models trained anew: identical where they must be, found out where they are not."""

import json

import numpy as np
import pytest

from paperlib import config, paths, records, verify
from paperlib.__main__ import main


@pytest.fixture
def trained(home, one_thread):
    assert main(["train", "--scale", "demo", "--recipe", "ce", "digamma", "--workers", "1"]) == 0
    return config.load("demo")


def rewrite(path, change):
    """Edit the provenance and the arrays of a stored prediction."""
    with np.load(path) as arrays:
        content = dict(arrays)
    provenance = json.loads(str(content["provenance"]))
    change(provenance, content)
    content["provenance"] = np.array(json.dumps(provenance, sort_keys=True))
    np.savez_compressed(path, **content)


def test_models_are_drawn_among_what_is_stored(trained):
    jobs = verify.choose(trained, ["digits"], 3, seed=0)
    assert len(set(jobs)) == 3
    assert all(records.job_path("demo", job).exists() for job in jobs)
    assert jobs == verify.choose(trained, ["digits"], 3, seed=0)
    assert any(jobs != verify.choose(trained, ["digits"], 3, seed=seed) for seed in range(1, 6))
    assert len(verify.choose(trained, ["digits"], 99, seed=0)) == 5  # three members, two evidential runs


def test_nothing_stored_is_an_error(home):
    with pytest.raises(records.RecordError, match="holds no prediction of digits"):
        verify.choose(config.load("demo"), ["digits"], 3, seed=0)


def test_the_same_machine_gives_the_same_bits_and_stored_files_stay(trained, capsys):
    before = {path: path.read_bytes() for path in paths.results("demo").rglob("*.npz")}
    assert main(["verify", "--scale", "demo", "--models", "5", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("identical to what is stored") == 5
    assert out.endswith("5 of 5 are as released\n")
    assert before == {path: path.read_bytes() for path in paths.results("demo").rglob("*.npz")}


def test_a_changed_number_is_found_out(trained, capsys):
    path = records.prediction_path("demo", "digits", "ce", 1)
    rewrite(path, lambda provenance, arrays: arrays["test"].__setitem__((0, 0, 0), arrays["test"][0, 0, 0] ^ 1))
    assert main(["verify", "--scale", "demo", "--models", "5", "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "digits/ce/seed 1: DIFFERS FROM what is stored (hardware and versions of the same names)" in out
    assert out.endswith("4 of 5 are as released\n")


def test_other_hardware_needs_to_be_near_only(trained):
    job = trained.job("digits", "ce", 0)
    path = records.job_path("demo", job)
    anew = path.with_name("anew.npz")
    anew.write_bytes(path.read_bytes())
    rewrite(path, lambda provenance, arrays: provenance.update(hardware="another"))
    assert verify.compare(trained, job, anew).good  # same bits on other hardware: as good as it gets
    rewrite(path, lambda provenance, arrays: arrays["test"].__setitem__((0, 0, 0), arrays["test"][0, 0, 0] ^ 1))
    near = verify.compare(trained, job, anew)
    assert near.good and not near.identical and "agrees with what is stored (other hardware" in str(near)
    rewrite(path, lambda provenance, arrays: arrays.update(test=arrays["test"][:, ::-1].copy()))
    far = verify.compare(trained, job, anew)
    assert not far.good and far.distance > verify.MEAN_DISTANCE


def test_other_images_cannot_be_compared(trained):
    job = trained.job("digits", "ce", 0)
    path = records.job_path("demo", job)
    anew = path.with_name("anew.npz")
    anew.write_bytes(path.read_bytes())

    def change(provenance, arrays):
        provenance["data"]["digest"] = "0"
        arrays["history"][0, 1] += 1

    rewrite(path, change)
    other = verify.compare(trained, job, anew)
    assert not other.good and "CANNOT BE COMPARED: the images are not those it was trained on" in str(other)
