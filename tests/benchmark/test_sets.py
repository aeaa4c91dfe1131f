"""The benchmark's sets: read from tiny files in their formats, and from the real ones where they are."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from coterie.benchmark.sets import SETS, load
from coterie.benchmark.sets.pictures import BATCHES
from coterie.benchmark.sets.shakespeare import ALPHABET, LENGTH, speeches
from coterie.benchmark.tasks import Population, candidates
from coterie.errors import DataError, KnobError

REAL = os.environ.get("COTERIE_DATA")


def table(people: Population) -> pd.DataFrame:
    assert isinstance(people.inputs, pd.DataFrame)
    return people.inputs


def written(tmp_path: Path, name: str, file: str, text: str) -> Path:
    folder = tmp_path / SETS[name].folder
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(text, encoding="utf-8")
    return tmp_path


def test_vowels_are_read_by_speaker(tmp_path: Path) -> None:
    features = [f"{-1.5 + i / 10:.3f}" for i in range(10)]
    lines = [f"0 7 1 {' '.join(features)}  3", f"1 2 0 {' '.join(reversed(features))} 10"]
    people = load(
        SETS["vowels"], written(tmp_path, "vowels", "vowel-context.data", "\n".join(lines) + "\n")
    )
    assert people.names == ["speaker 2", "speaker 7"]
    assert people.targets.tolist() == [10, 3]
    assert table(people).iloc[1].tolist() == [float(f) for f in features]


def test_wisdm_is_read_in_spite_of_its_header(tmp_path: Path) -> None:
    header = '@relation activity\n\n@attribute "UNIQUE_ID" numeric\n@attribute "user" \n@attribute "X0" numeric\n'
    header += '@attribute "XPEAK" numeric\n@attribute class\n\n@data\n'
    rows = "1,33,0.04,?,Jogging\n2,8,0.5,2075,Downstairs\n\n3,33,0.1,1.5,Walking\n"
    people = load(
        SETS["wisdm"], written(tmp_path, "wisdm", "WISDM_ar_v1.1_transformed.arff", header + rows)
    )
    assert people.owners.tolist() == ["person 8", "person 33", "person 33"]
    assert people.targets.tolist() == [5, 1, 0]
    assert list(table(people).columns) == ["X0", "XPEAK"]
    assert table(people)["XPEAK"].isna().tolist() == [False, True, False]


def test_heart_disease_knows_three_ways_to_be_missing(tmp_path: Path) -> None:
    rows = {
        "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n",
        "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,0\n29,1,2,120,243,0,0,160,0,0,?,-9,?,1\n",
        "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n",
        "va": "63,1,4,140,260,0,1,112,1,-0.5,2,?,?,4\n",
    }
    for hospital, text in rows.items():
        written(tmp_path, "heart", f"processed.{hospital}.data", text)
    people = load(SETS["heart"], tmp_path)
    assert people.owners.tolist() == ["cleveland", "hungarian", "hungarian", "switzerland", "va"]
    assert people.targets.tolist() == [0, 0, 1, 1, 1]
    assert table(people)["chol"].isna().tolist() == [False, False, False, True, False]
    assert table(people)["ca"].isna().tolist() == [False, True, True, True, True]
    assert table(people)["oldpeak"].iloc[-1] == -0.5
    assert "num" not in table(people)


def test_school_exams_are_read_without_the_constant(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [3, 2]
    inputs, scores = np.empty((1, 2), object), np.empty((1, 2), object)
    for k, n in enumerate(sizes):
        inputs[0, k] = np.hstack([rng.integers(0, 9, (n, 27)), np.ones((n, 1))]).astype(np.uint8)
        scores[0, k] = np.arange(n, dtype=np.uint8)[:, None] + 10 * k
    (tmp_path / "school_exam").mkdir()
    savemat(tmp_path / "school_exam" / "school.mat", {"X": inputs, "Y": scores})
    people = load(SETS["school"], tmp_path)
    assert people.owners.tolist() == ["school 0"] * 3 + ["school 1"] * 2
    assert people.targets.tolist() == [0, 1, 2, 10, 11]
    assert people.n_classes == 0
    np.testing.assert_array_equal(table(people).to_numpy()[3:], inputs[0, 1][:, :27])


def write_mnist(folder: Path, labels: list[int], writers: list[int]) -> np.ndarray:
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (BATCHES * 2, 784), dtype=np.uint8)
    for k in range(BATCHES):
        Image.fromarray(images[2 * k : 2 * k + 2]).save(folder / f"mnist_batch_{k}.png")
    (folder / "mnist_labels.js").write_text(f"var labels={[*labels, 7, 7]};", encoding="utf-8")
    about = np.zeros((len(labels), 8), ">i4")
    about[:, 0], about[:, 2] = labels, writers
    header = np.array([0x0C02, len(labels), 8], ">i4").tobytes()
    (folder / "qmnist-train-labels-idx2-int.gz").write_bytes(
        gzip.compress(header + about.tobytes())
    )
    return images


def test_mnist_finds_its_writers(tmp_path: Path) -> None:
    labels = [i % 10 for i in range(2 * BATCHES)]
    writers = [9 - i % 3 for i in range(len(labels))]
    images = write_mnist(tmp_path / "mnist_by_writer", labels, writers)
    people = load(SETS["mnist"], tmp_path)
    assert people.names == ["writer 7", "writer 8", "writer 9"]
    mine = [i for i, writer in enumerate(writers) if writer == 8]
    assert people.targets[people.rows("writer 8")].tolist() == [labels[i] for i in mine]
    assert isinstance(people.inputs, torch.Tensor)
    pictures = people.inputs[torch.from_numpy(people.rows("writer 8"))].reshape(-1, 784).numpy()
    np.testing.assert_array_equal(pictures, images[mine])


def test_mnist_refuses_labels_that_belong_to_other_pictures(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist_by_writer", [1] * 30, [0] * 30)
    with pytest.raises(DataError, match=r"40 digits.*30 digits.*do not\s+belong together"):
        load(SETS["mnist"], tmp_path)


def test_shakespeare_is_cut_into_examples_that_do_not_overlap(tmp_path: Path) -> None:
    def speech(speaker: str, *lines: str) -> str:
        return f"<SPEECH><SPEAKER>{speaker}</SPEAKER>{''.join(f'<LINE>{x}</LINE>' for x in lines)}</SPEECH>"

    said = ["When shall we three", "meet again & again?"]
    escaped = [line.replace("&", "&amp;") for line in said]
    parts = [
        speech("First Witch", escaped[0]),
        speech("Ross", "No"),
        speech("First Witch", escaped[1]),
    ]
    (tmp_path / "shakespeare").mkdir()
    path = tmp_path / "shakespeare" / "shakespeare.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shakespeare/macbeth.xml", f"<PLAY><ACT>{''.join(parts)}</ACT></PLAY>")
        archive.writestr("shakespeare/README", "not a play")
    text = "\n".join(said)
    assert speeches(path) == {"macbeth: First Witch": text, "macbeth: Ross": "No"}
    people = load(SETS["shakespeare"], tmp_path)
    n = (len(text) - 1) // LENGTH
    assert people.owners.tolist() == ["macbeth: First Witch"] * n
    assert isinstance(people.inputs, torch.Tensor)
    clean = text.lower().replace("&", " ")
    spell = dict(enumerate(ALPHABET))
    assert "".join(spell[i] for i in people.inputs.flatten().tolist()) == clean[: n * LENGTH]
    assert "".join(spell[i] for i in people.targets.ravel().tolist()) == clean[1 : n * LENGTH + 1]


@pytest.mark.parametrize("name", [name for name in SETS if name != "digits"])
def test_a_missing_file_is_named_with_where_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load(SETS[name], tmp_path)
    assert str(tmp_path / SETS[name].folder / SETS[name].files[0]) in str(error.value)
    assert SETS[name].source in str(error.value)
    assert "--data" in str(SETS[name].missing(None))


def test_digits_need_no_folder_and_unknown_sets_are_refused() -> None:
    assert SETS["digits"].missing(None) is None
    with pytest.raises(KnobError, match="unknown set 'letters'; the sets are digits, mnist"):
        load(SETS["letters"])


@pytest.mark.skipif(REAL is None, reason="COTERIE_DATA names no folder with the real sets")
@pytest.mark.parametrize(
    ("name", "users", "examples", "fewest", "most"),
    [
        ("digits", 14, 1797, 114, 139),
        ("mnist", 539, 60000, 19, 131),
        ("wisdm", 36, 5418, 60, 273),
        ("heart", 4, 920, 123, 303),
        ("school", 139, 15362, 22, 251),
        ("vowels", 15, 990, 66, 66),
    ],
)
def test_real_sets_have_the_known_sizes(
    name: str, users: int, examples: int, fewest: int, most: int
) -> None:
    people = load(SETS[name], Path(str(REAL)))
    counts = [len(people.rows(user)) for user in people.names]
    assert (len(counts), sum(counts), min(counts), max(counts)) == (users, examples, fewest, most)
    assert len(people) == examples
    if people.n_classes:
        assert sorted(np.unique(people.targets)) == list(range(people.n_classes))
    assert candidates(people, SETS[name].own_examples)


@pytest.mark.skipif(REAL is None, reason="COTERIE_DATA names no folder with the real sets")
def test_the_real_plays_have_the_known_sizes() -> None:
    spoken = speeches(Path(str(REAL)) / "shakespeare" / "shakespeare.zip")
    characters = {speaker: len(text.replace("\n", "")) for speaker, text in spoken.items()}
    assert len(characters) == 298
    assert sum(characters.values()) == 908_978
    assert sum(n >= 2000 for n in characters.values()) == 79
    assert sum(n >= 10_000 for n in characters.values()) == 25
