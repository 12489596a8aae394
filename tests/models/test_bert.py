"""BERT encoders made differential: the same function, gradients, saved and loaded by transformers' Auto classes."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
)

import diffvision
from diffvision.export.command import adapt_to_folder
from diffvision.models import bert
from diffvision.models.adapt import merge_dex
from diffvision.nn import DexAttention, DiffAttention, DiffAttentionV2

SIZES = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LAYERS = {"v2": DiffAttentionV2, "dex": DexAttention, "v1": DiffAttention}


def _bert(kind=BertModel, **settings):
    torch.manual_seed(0)
    model = kind(BertConfig(**SIZES, max_position_embeddings=64, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def _batch():
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 13:] = 0
    return {"input_ids": torch.randint(99, (2, 20)), "attention_mask": mask}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["v2", "dex"])
def test_an_adapted_encoder_computes_the_same(method, kernel):
    before = _bert(attn_implementation=kernel)
    after, batch = diffvision.adapt(copy.deepcopy(before), method), _batch()
    with torch.no_grad():
        expected, out = before(**batch), after(**batch)
    torch.testing.assert_close(out.last_hidden_state, expected.last_hidden_state, rtol=0, atol=2e-6)
    torch.testing.assert_close(out.pooler_output, expected.pooler_output, rtol=0, atol=2e-6)
    assert sum(isinstance(module, LAYERS[method]) for module in after.modules()) == 2
    assert type(after) is bert.AdaptedBertModel


def test_maps_are_those_of_the_layer():
    model, batch = diffvision.adapt(_bert(attn_implementation="eager"), "v2"), _batch()
    maps = model(**batch, output_attentions=True).attentions
    assert [one.shape for one in maps] == [(2, 4, 20, 20)] * 2
    torch.testing.assert_close(maps[0].sum(-1), torch.full((2, 4, 20), 0.5))  # 1 - lambda
    assert (maps[0][0, :, :, 13:] == 0).all()


@pytest.mark.parametrize("method", ["v2", "dex", "v1"])
def test_a_saved_model_is_loaded_as_what_it_is(method, tmp_path):
    model, batch = diffvision.adapt(_bert(BertForMaskedLM), method).eval(), _batch()
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert (type(again), again.config.method) == (bert.AdaptedBertForMaskedLM, method)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(
        encoder.encoder.layer[0].attention.self.attn.q_proj.weight,
        model.bert.encoder.layer[0].attention.self.attn.q_proj.weight,
    )


def test_new_weights_are_trained_alone():
    model = diffvision.adapt(_bert(BertForMaskedLM), "v2", only_new=True).train()
    model(**_batch(), labels=torch.randint(99, (2, 20))).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if "q_proj" in name or "lambda_proj" in name}


def test_the_command_writes_a_folder_with_its_tokenizer(tmp_path, capsys):
    _bert().save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    adapt_to_folder(str(tmp_path / "bert"), str(tmp_path / "v2"), method="v2")
    assert "v2: outputs differ by" in capsys.readouterr().out
    batch = _batch()
    with torch.no_grad():
        expected = BertModel.from_pretrained(tmp_path / "bert")(**batch).last_hidden_state
        out = AutoModel.from_pretrained(tmp_path / "v2")(**batch).last_hidden_state
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    assert (tmp_path / "v2" / "vocab.txt").is_file()


def test_modules_of_sentence_transformers_keep_their_weights(tmp_path):
    _bert().save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, tmp_path / "bert" / "2_Dense" / "model.safetensors")
    (tmp_path / "bert" / "onnx").mkdir()
    (tmp_path / "bert" / "onnx" / "model.onnx").write_bytes(b"of the encoder before")
    adapt_to_folder(str(tmp_path / "bert"), str(tmp_path / "v2"), method="v2")
    assert load_file(tmp_path / "v2" / "2_Dense" / "model.safetensors").keys() == {"linear.weight"}
    assert not (tmp_path / "v2" / "onnx").exists()


def test_damaged_weights_are_one_error(tmp_path):
    _bert().save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").write_bytes(bytes(50))
    with pytest.raises(ValueError, match="are damaged"):
        adapt_to_folder(str(tmp_path / "bert"), str(tmp_path / "v2"), method="v2")


def test_what_is_no_encoder_or_differential_already_is_refused():
    with pytest.raises(ValueError, match="a BERT that is a decoder cannot be"):
        diffvision.adapt(_bert(is_decoder=True))
    with pytest.raises(ValueError, match="BertLMHeadModel is not adapted"):
        diffvision.adapt(_bert(BertLMHeadModel, is_decoder=True))
    with pytest.raises(ValueError, match="AdaptedBertModel has attention"):
        diffvision.adapt(diffvision.adapt(_bert()))
    with pytest.raises(ValueError, match="pairs heads: 3"):
        diffvision.adapt(BertModel(BertConfig(**{**SIZES, "num_attention_heads": 3})), "v1")
    with pytest.raises(ValueError, match="method is 'v3'"):
        bert.AdaptedBertModel(bert.AdaptedBertConfig(**SIZES, method="v3"))


def test_merged_dex_is_bert_again(tmp_path):
    model, batch = diffvision.adapt(_bert(BertForMaskedLM), "dex"), _batch()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.attn.dex.normal_(std=0.2)
        expected = model(**batch).logits
    merged = merge_dex(model)
    assert (type(merged), merged.config.model_type) == (BertForMaskedLM, "bert")
    merged.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            BertForMaskedLM.from_pretrained(tmp_path)(**batch).logits, expected, rtol=0, atol=1e-5
        )


def test_weights_that_a_file_lacks_begin_as_new_ones(tmp_path):
    diffvision.adapt(_bert(), "dex").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "dex" not in name}, file)
    layer = AutoModel.from_pretrained(tmp_path).encoder.layer[1].attention.self.attn
    assert (layer.dex == 0).all()
    assert layer.dex_heads.all()
    assert layer.dex_schedule.tolist() == [1, 1]


def test_maps_are_recorded_after_they_were_before():
    """transformers' hooks are put on the model at its first call that wants maps."""
    model, batch = _bert(attn_implementation="eager"), _batch()
    assert len(model(**batch, output_attentions=True, output_hidden_states=True).attentions) == 2
    out = diffvision.adapt(model)(**batch, output_attentions=True, output_hidden_states=True)
    assert (len(out.attentions), len(out.hidden_states)) == (2, 3)


def test_a_folder_without_a_pooler_has_none_afterwards(tmp_path):
    BertModel(BertConfig(**SIZES), add_pooling_layer=False).save_pretrained(tmp_path / "bert")
    adapt_to_folder(str(tmp_path / "bert"), str(tmp_path / "v2"))
    assert not [name for name in load_file(tmp_path / "v2" / "model.safetensors") if "pooler" in name]


def test_folders_that_would_lose_something_are_refused(tmp_path):
    BertForPreTraining(BertConfig(**SIZES)).save_pretrained(tmp_path / "heads")
    with pytest.raises(ValueError, match="is a BertForPreTraining, whose head"):
        adapt_to_folder(str(tmp_path / "heads"), str(tmp_path / "v2"))
    _bert().save_pretrained(tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "1.attention.self.query" not in name}, file)
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1\.attention"):
        adapt_to_folder(str(tmp_path / "part"), str(tmp_path / "v2"))
    infinite = _bert()
    infinite.save_pretrained(tmp_path / "whole")
    infinite.pooler.dense.bias.data[0] = torch.inf
    infinite.save_pretrained(tmp_path / "infinite")
    with pytest.raises(ValueError, match=r"1 tensors of .* are not finite"):
        adapt_to_folder(str(tmp_path / "infinite"), str(tmp_path / "v2"))
    diffvision.adapt(_bert()).save_pretrained(tmp_path / "adapted")
    with pytest.raises(ValueError, match="differential already"):
        adapt_to_folder(str(tmp_path / "adapted"), str(tmp_path / "v2"))
    with pytest.raises(ValueError, match="heads is 'x': give all"):
        adapt_to_folder(str(tmp_path / "whole"), str(tmp_path / "v2"), method="dex", heads="x")
    assert not (tmp_path / "v2").exists()


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        (
            BertModel,
            {"num_hidden_layers": 1},
            r"describe: encoder\.layer\.1\..* is not in the model; .* \(and 12 more\)",
        ),
        (BertForSequenceClassification, {"num_hidden_layers": 1}, r"bert\.encoder\.layer\.1\..* is not in the model"),
        (BertForSequenceClassification, {"architectures": ["BertModel"]}, r"classifier\.bias is not in the model"),
        (BertModel, {"vocab_size": 90}, r"word_embeddings\.weight is \[99, 48\] in its file and \[90, 48\] by its"),
        (BertModel, {"hidden_size": 32}, r"is \[64, 48\] in its file and \[64, 32\] by its config\.json"),
        (BertModel, {"max_position_embeddings": 32}, r"is \[64, 48\] in its file and \[32, 48\] by its config\.json"),
        (BertModel, {"hidden_act": "relu6x"}, "hidden_act 'relu6x', which transformers does not know: correct"),
    ],
    ids=str,
)
def test_a_configuration_of_other_weights_is_refused(kind, changed, message, tmp_path):
    _bert(kind).save_pretrained(tmp_path / "bert")
    config = tmp_path / "bert" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    with pytest.raises(ValueError, match=message):
        adapt_to_folder(str(tmp_path / "bert"), str(tmp_path / "v2"))
    assert not (tmp_path / "v2").exists()


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_heads_of_pretraining_may_be_left_out(name, tmp_path):
    """As bert-base-uncased is published: weights of BertForPreTraining, and a buffer that is no longer saved."""
    model = _bert(BertForPreTraining)
    model.save_pretrained(tmp_path / "bert")
    config, file = tmp_path / "bert" / "config.json", tmp_path / "bert" / "model.safetensors"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [name]}))
    save_file({**load_file(file), "bert.embeddings.position_ids": torch.arange(64)[None]}, file, {"format": "pt"})
    adapt_to_folder(str(tmp_path / "bert"), str(tmp_path / "v2"))
    out = AutoModel.from_pretrained(tmp_path / "v2")(**(batch := _batch())).last_hidden_state
    torch.testing.assert_close(out, model.bert(**batch).last_hidden_state, rtol=0, atol=2e-6)


def test_attention_that_adapted_layers_have_not_is_refused_before_anything_changes():
    model = _bert()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="attends by 'flex_attention'"):
        diffvision.adapt(model)
    assert not any("Adapted" in type(part).__name__ for part in model.modules())


def test_adapting_without_transformers_needs_none_of_it(tmp_path):
    program = """import sys
sys.modules["transformers"] = None  # cannot be imported
import timm, diffvision
diffvision.adapt(timm.create_model("vit_tiny_patch16_224", depth=1))"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.weights
@pytest.mark.parametrize("method", ["v2", "dex"])
def test_minilm_computes_the_same(method, weights):
    sha256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    folder = weights("model.safetensors", sha256).parent
    before = AutoModel.from_pretrained(folder)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        ["a cat", "two dogs on a hill"], padding=True, return_tensors="pt"
    )
    after = diffvision.adapt(copy.deepcopy(before), method)
    with torch.no_grad():
        expected, out = before(**batch).last_hidden_state, after(**batch).last_hidden_state
    real = batch["attention_mask"].bool()  # rounding adds up in padding, which nothing reads
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=1e-5)
