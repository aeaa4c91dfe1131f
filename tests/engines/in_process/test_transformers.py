"""Models of transformers, adapters of PEFT, rows of datasets: small, built from configurations, nothing loaded."""

from __future__ import annotations

import copy
import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import coterie
from coterie.errors import DataError
from coterie.gradients.parameters import Parameters

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, intermediate_size=24, max_position_embeddings=16)
    return transformers.LlamaForCausalLM(config)


def adapted() -> Any:
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def bert() -> Any:
    config = transformers.BertConfig(
        **SMALL,
        intermediate_size=24,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


@coterie.per_example
def of_words(output: Any, targets: Tensor) -> Tensor:
    return f.cross_entropy(output.logits.transpose(1, 2), targets, reduction="none")


@coterie.per_example
def of_texts(output: Any, targets: Tensor) -> Tensor:
    return f.cross_entropy(output.logits, targets, reduction="none")


def make_users(*, masked: bool, words: bool, labels: bool = False) -> list[coterie.User]:
    generator = torch.Generator().manual_seed(0)
    users = []
    for k, name in enumerate(("me", "a", "b", "c")):
        ids = torch.randint(1, 40, (8 + k, 7), generator=generator)
        inputs = {"input_ids": ids}
        if masked:
            lengths = torch.randint(3, 8, (len(ids),), generator=generator)
            inputs["attention_mask"] = (torch.arange(7) < lengths[:, None]).long()
        targets = ids.roll(-1, 1) if words else ids[:, 0] % 3
        if labels:
            inputs["labels"] = targets
        held = ({key: value[:6] for key, value in inputs.items()}, None if labels else targets[:6])
        users.append(
            coterie.User(name, inputs, None if labels else targets, validation=None if k else held)
        )
    return users


CASES: dict[str, tuple[Callable[[], Any], Any, bool]] = {
    "llama": (llama, of_words, True),
    "adapter": (adapted, of_words, True),
    "bert": (bert, of_texts, False),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_passes_are_shared_and_right(name: str, masked: bool) -> None:
    make, loss, words = CASES[name]
    torch.manual_seed(0)
    model: nn.Module = make().double()
    users = make_users(masked=masked, words=words)
    engine = coterie.InProcess(model, loss, users[0], users[1:], batch_size=4)
    assert engine.describe()["average"] == "one pass"
    assert engine.capabilities.not_stacked is None  # the default rule passes its copies together
    x = Parameters(model).vector()
    x = x + 0.1 * torch.randn(len(x), generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    tau = {"a": 0.5, "b": 0.3, "c": 0.2}
    plain = coterie.InProcess(model, loss, users[0], users[1:], batch_size=4, one_by_one=True)
    rows, wanted = (each.gradients(x, 3, tau, rows=True).rows for each in (engine, plain))
    assert rows is not None
    assert wanted is not None
    torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-8)
    average = engine.gradients(x, 3, tau).peers
    assert average is not None
    torch.testing.assert_close(
        average, torch.tensor([0.5, 0.3, 0.2]).double() @ wanted, rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("masked", [False, True])
def test_copies_of_an_adapter_are_passed_together(masked: bool) -> None:
    """The default rule on an adapter: the same run, to rounding, as where the loss says nothing of its examples."""
    torch.manual_seed(0)
    model = adapted().double()
    before = copy.deepcopy(model)
    me, *peers = make_users(masked=masked, words=True)

    def mean(output: Any, targets: Tensor) -> Tensor:
        return f.cross_entropy(output.logits.transpose(1, 2), targets)

    fast, slow = (
        coterie.train(model, loss, me, peers, steps=4, batch_size=4, lr=0.05, measure=False)
        for loss in (of_words, mean)
    )
    assert fast.record.end.account["tau"] == pytest.approx(slow.record.end.account["tau"], rel=1e-6)
    ours, theirs = (dict(run.model.named_parameters()) for run in (fast, slow))
    for name, first in before.named_parameters():
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
        if "lora" not in name:
            assert torch.equal(ours[name], first)
    assert {"loss", "accuracy"} <= fast.record.points[-1].validation.keys()


def test_the_models_own_loss_and_output() -> None:
    torch.manual_seed(0)
    me, *peers = make_users(masked=True, words=True, labels=True)
    kinds = []

    def perplexity(output: Any, targets: Any) -> float:
        kinds.append(type(output).__name__)
        return float(output.loss.exp())

    run = coterie.train(
        llama(),
        coterie.model_loss,
        me,
        peers,
        coterie.WeightedAveraging(0.5),
        steps=3,
        batch_size=4,
        metrics={"perplexity": perplexity},
    )
    assert set(kinds) == {"CausalLMOutputWithPast"}
    assert run.record.points[-1].validation["perplexity"] > 1


def test_rows_of_a_data_set() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    even = {"input_ids": [[1, 2, 3], [4, 5, 6]], "label": [0, 1], "text": ["a", "b"]}
    user = coterie.User.from_hugging_face(
        "a", datasets.Dataset.from_dict(even), ["input_ids"], "label"
    )
    inputs, targets = user.batch(2, seed=0, step=0)
    assert inputs["input_ids"].tolist() == even["input_ids"]
    assert targets.tolist() == [0, 1]
    alone = coterie.User.from_hugging_face(
        "a", datasets.Dataset.from_dict(even), "input_ids", "label"
    )
    assert alone.batch(2, seed=0, step=0)[0].tolist() == even["input_ids"]

    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "label": [0, 1]})
    with pytest.raises(
        DataError, match=r"column 'input_ids' of user 'a' is not one tensor .*give `collate`"
    ):
        coterie.User.from_hugging_face("a", ragged, ["input_ids"], "label")
    with pytest.raises(DataError, match=r"no column ids; its columns are: input_ids, label"):
        coterie.User.from_hugging_face("a", ragged, ["ids"], "label")

    def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:  # as `DataCollatorWithPadding`
        ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        return {"input_ids": ids, "label": torch.stack([row["label"] for row in rows])}

    user = coterie.User.from_hugging_face("a", ragged, ["input_ids"], "label", collate=pad)
    inputs, targets = user.batch(2, seed=0, step=0)
    assert inputs["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert targets.tolist() == [0, 1]


def test_the_example_of_a_personal_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two plays of seven speakers with little to say; the example reads them, trains three adapters and tells."""
    root = ElementTree.Element("PLAY")
    for speaker in ["MACBETH", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX"]:
        for turn in range(60):
            speech = ElementTree.SubElement(root, "SPEECH")
            ElementTree.SubElement(speech, "SPEAKER").text = speaker
            ElementTree.SubElement(
                speech, "LINE"
            ).text = f"my name is {speaker.lower()}, said {turn} times over"
    with zipfile.ZipFile(tmp_path / "shakespeare.zip", "w") as archive:
        for play in ("macbeth", "other"):
            archive.writestr(f"{play}.xml", ElementTree.tostring(root))
    path = Path(__file__).parents[3] / "examples" / "adapter.py"
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main([str(tmp_path), "--steps", "3", "--base-steps", "2"])
    out = capsys.readouterr().out
    assert "40 sequences; with " in out
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["alone", "pooled", "default"]
