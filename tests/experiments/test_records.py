"""Records of results: whatever is changed in them, or in the files that they are of, is one line."""

import json
from pathlib import Path

import pytest
from benchmark_summary import write_summary

from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import (
    Baselines,
    RunResult,
    best_checkpoint,
    checked_file,
    divide,
    read_result,
    read_results,
    read_summary,
    summarize,
    summarize_divided,
    write_record,
    write_result,
)
from amos_fairseq.experiments.session import claim_output_directory
from amos_fairseq.files import file_sha256

FILES = ("task.json", "tasks/chunk/labels.txt", "predictions.tsv", "checkpoint_best.pt")


def write_run(out: Path, task: str = "Toy", seed: int = 1, **changed) -> Path:
    directory = out / "runs" / task / f"seed{seed}"
    for name in FILES:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"{name} of {seed}")
    files = {name: file_sha256(directory / name) for name in FILES}
    fields = {"checkpoint_sha256": [files.pop("checkpoint_best.pt")], "files": files, "notes": ["a note"]}
    fields |= {"identity": {"seed": seed}, "versions": {"torch": "2"}, "epoch": 3.0, "seconds": 60.5}
    fields |= {"task": task, "trial": "", "seed": seed, "directory": f"runs/{task}/seed{seed}"}
    fields |= {"scores": {"accuracy": 60.0 + seed, "mse": 1e9, "matthews": 100.00000000000001}}
    fields |= {"main_score": "accuracy", "checkpoint": "checkpoint_best.pt"}
    write_result(out, RunResult(**fields | changed))
    return directory


def test_what_is_written_is_read_back(tmp_path):
    write_run(tmp_path, seed=2)
    write_run(tmp_path)
    results = read_results(tmp_path)
    assert [(result.seed, result.main) for result in results] == [(1, 61.0), (2, 62.0)]
    for result in results:
        assert best_checkpoint(tmp_path, result).read_text() == f"checkpoint_best.pt of {result.seed}"
    assert read_result(tmp_path) is None
    write_run(tmp_path, seed=3, scores={"accuracy": 1.0})
    with pytest.raises(UserError, match=r"runs/Toy/seed3 has the scores accuracy, not accuracy, mse, matthews: move"):
        summarize(read_results(tmp_path))
    with pytest.raises(UserError, match=r"runs/Toy/seed3 has no score part f1: move"):  # of a task that it has learned
        summarize_divided(read_results(tmp_path)[2:], lambda result: divide(result, {"part": "f1"}))


@pytest.mark.parametrize("scores", [{"accuracy": float("nan")}, {"accuracy": 61.0, "mse": float("inf")}])
def test_scores_that_are_not_finite_are_not_written(tmp_path, scores):
    with pytest.raises(UserError, match=r"is not (finite|from).*, give a lower --lr"):
        write_run(tmp_path, scores=scores)
    assert not list(tmp_path.rglob("result.json"))


# A changed byte is a wrong fingerprint. Here the fingerprint is right: somebody has written another result.
# What is no result at all is in tests/test_hostile_files.py.
FORGED = [
    *({"directory": path} for path in ("/etc", "../Toy/seed1", "runs/../seed1", "runs/./a", "runs//a", "runs", "a/b")),
    *({"checkpoint": name} for name in ("../checkpoint_best.pt", "/checkpoint_best.pt", "last")),
    *({"task": name} for name in ("", "a\nb", "a\x1b[2J", "x" * 20_000)),
    *({"scores": scores} for scores in ({}, {"accuracy": 955.0}, {"accuracy": "80"})),
    *({"seed": -1}, {"epoch": -1}, {"seconds": "60"}, {"checkpoint_sha256": [1]}, {"notes": ["a\x1b[2J"]}, {"more": 1}),
    {"main_score": "f1"},
]


def test_a_hostile_result_is_one_line(tmp_path):
    directory = write_run(tmp_path)
    file = directory / "result.json"
    text = file.read_text()
    whole = json.loads(text)
    whole.pop("sha256")
    for content, message in ((text.replace("61.0", "95.0"), "was changed, or is of"), ("{", "is not JSON")):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"result\.json.*{message}.*: move {directory} away and repeat the comm"):
            read_results(tmp_path)
    for change in FORGED:
        write_record(file, whole | change)
        with pytest.raises(UserError, match=r"is not the result of a run \(.+\): move") as refused:
            read_results(tmp_path)
        assert len(str(refused.value)) < 1000
    for changed in ({"seed": 2}, {"task": "Other"}, {"trial": "lr1"}, {"directory": "runs/Toy/seed2"}):
        write_record(file, whole | changed)
        with pytest.raises(UserError, match="is the result of"):
            read_results(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_does_not_belong_to_the_result_is_not_used(tmp_path, name):
    """Such as the checkpoint of another seed, or labels in another order."""
    directory, other = write_run(tmp_path), write_run(tmp_path, seed=2)
    file, (result, _) = directory / name, read_results(tmp_path)
    checked_file(directory, result, name)
    file.write_bytes((other / name).read_bytes())
    for message in ("was changed after the run", "is missing"):
        with pytest.raises(UserError, match=rf"{name} {message}: restore it, or move {directory} away and repeat"):
            checked_file(directory, result, name)
        if name != "predictions.tsv":
            with pytest.raises(UserError, match=message):
                best_checkpoint(tmp_path, result)
        file.unlink(missing_ok=True)


def test_a_hostile_summary_is_one_line(tmp_path):
    """Also with the right fingerprint."""
    file = Path(write_summary(tmp_path, 5, tmp_path / "run", RTE=50.0, MNLI=60.0)) / "glue.json"
    text = file.read_text()
    whole = json.loads(text)
    whole.pop("sha256")
    of_task, run = whole["tasks"]["RTE"], whole["runs"][0]
    for change in (
        {"runs": [run | {"directory": "../elsewhere"}]},
        {"runs": [run | {"scores": {"accuracy": 955.0}}]},
        {"runs": whole["runs"][:3]},
        {"tasks": {"RTE": of_task | {"settings": "lr1"}}},
        {"setup": {"from_scratch": 1}},
        {"checkpoint": {"file": "a", "num_updates": -1}},
        {"baselines": {"RTE": {"num_scored": 0, "scores": {}}}},
        {"baselines": {"RTE": {"num_scored": 9, "scores": {"mean": {"accuracy": 101.0}}}}},
    ):
        write_record(file, whole | change)
        with pytest.raises(UserError, match=r"glue\.json holds no results of fine-tuning \(.+\): repeat it"):
            read_summary(file, "repeat it")
    good = {"num_scored": 9, "scores": {"mean": {"accuracy": 50.0}}, "data_sha256": "d"}
    write_record(file, whole | {"baselines": {"RTE": good}})
    assert read_summary(file, "").baselines == {"RTE": Baselines(9, {"mean": {"accuracy": 50.0}}, "d")}
    file.write_text(text.replace("50.0", "95.0"))
    with pytest.raises(UserError, match=r"glue\.json was changed, or is of another version of this package: repeat it"):
        read_summary(file, "repeat it")


def test_settings_of_an_output_that_are_damaged(tmp_path):
    (tmp_path / "glue.setup.json").write_text("[]")
    with pytest.raises(UserError, match=r"glue\.setup\.json contains \[\], not an object"):
        claim_output_directory(tmp_path, "glue", {})
