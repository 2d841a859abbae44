"""Transformers models to ONNX: with and without a cache, from configs and models, by torch's exporter or their own."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import transformers
from checkpoints import SMALL, VOCABULARY, assert_close, randomized

from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import ExportResult, epsilons, export, export_transformers, pairing, steps
from rmsnorm_onnx.exporters.dynamo import ROUTE as TORCH
from rmsnorm_onnx.exporters.transformers import ROUTE as OWN
from rmsnorm_onnx.parity import verify

STEPS = 6
WINDOW = 4  # shorter than what is generated, so that sliding layers forget
HEADS = {**SMALL, "head_dim": 16}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# A config and the number of its norms.
MODELS: dict[str, tuple[Any, int]] = {
    "llama": (lambda: transformers.LlamaConfig(**SMALL), 5),
    "qwen3": (lambda: transformers.Qwen3Config(**HEADS), 9),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**HEADS, **MIXED), 13),
    "gemma2": (lambda: transformers.Gemma2Config(**HEADS, **MIXED), 9),
    "mistral": (lambda: transformers.MistralConfig(sliding_window=WINDOW, **SMALL), 5),
    "phi3": (lambda: transformers.Phi3Config(**SMALL), 5),
    "olmo2": (lambda: transformers.Olmo2Config(**SMALL), 9),
    "granite": (lambda: transformers.GraniteConfig(**SMALL), 5),
    "smollm3": (lambda: transformers.SmolLM3Config(**SMALL), 5),
    "deepseek-v3": (
        lambda: transformers.DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=24,
            first_k_dense_replace=2,
        ),
        9,
    ),
    "mixtral": (lambda: transformers.MixtralConfig(num_local_experts=4, **SMALL), 5),
    "gpt-oss": (lambda: transformers.GptOssConfig(num_local_experts=4, **HEADS, **MIXED), 5),
}
OWN_EXPORTER = ("mixtral", "gpt-oss")  # torch has no translation for their experts


def build(name: str) -> Any:
    """A seeded model whose gains are not ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomized(transformers.AutoModelForCausalLM.from_config(MODELS[name][0](), attn_implementation="eager"))


def session(result: ExportResult, folder: Path) -> ort.InferenceSession:
    """Check a model fully and load it."""
    path = folder / "model.onnx"
    ir.save(result.model, path)
    onnx.checker.check_model(str(path), full_check=True)
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def decode(loaded: ort.InferenceSession, model: Any, dtype: str) -> None:
    """Prefill a padded batch and decode greedily: logits and choices are PyTorch's at every step."""
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    kind = np.dtype(dtype)
    past = {
        i.name: np.zeros([3 if isinstance(n, str) and axis == 0 else 0 if isinstance(n, str) else n
                          for axis, n in enumerate(i.shape)], kind)
        for i in loaded.get_inputs() if i.name.startswith("past_key_values.")
    }  # fmt: skip
    cache = None
    for _ in range(STEPS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            given = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
        cache = given.past_key_values
        feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy(), **past}
        logits, *present = loaded.run(None, feeds)
        seen = mask[:, -ids.shape[1] :].bool()
        assert_close(logits[seen.numpy()], given.logits[seen], dtype)
        names = [o.name for o in loaded.get_outputs()][1:]
        past = {n.replace("present", "past_key_values"): v for n, v in zip(names, present, strict=True)}
        chosen = given.logits[:, -1].argmax(-1, keepdim=True)
        if dtype == "float32":
            assert np.array_equal(logits[:, -1].argmax(-1), chosen[:, 0].numpy())
        ids, mask = chosen, torch.cat([mask, torch.ones_like(chosen)], 1)
    assert past["past_key_values.0.key"].shape[2] == 6 + STEPS - 1


def check_cached(name: str, folder: Path, dtype: str = "float32", opset: int = 18) -> ExportResult:
    """Export with a cache, find every norm, and decode."""
    model = build(name)
    result = export_transformers(model, cache=True, dtype=None if dtype == "float32" else dtype, opset=opset)
    assert (result.report.found, result.report.rewritten, result.report.declined) == (MODELS[name][1],) * 2 + (0,)
    assert result.route == (OWN if name in OWN_EXPORTER else TORCH)
    if dtype != "float32":
        model = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), dtype=dtype)
    decode(session(result, folder), model.eval(), dtype)
    return result


def test_cache_of_sliding_layers(tmp_path: Path) -> None:
    """Gemma 3 with its cache decodes as PyTorch does beyond its sliding window; names are the field's."""
    result = check_cached("gemma3", tmp_path)
    shapes = {v.name: [str(d) for d in v.shape] for v in (*result.model.graph.inputs, *result.model.graph.outputs)}
    past, present = ["batch", "2", "past_sequence", "16"], ["batch", "2", "total_sequence", "16"]
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total_sequence"],
        "position_ids": ["batch", "sequence"],
        **{f"past_key_values.{n}.{part}": past for n in (0, 1) for part in ("key", "value")},
        "logits": ["batch", "sequence", str(VOCABULARY)],
        **{f"present.{n}.{part}": present for n in (0, 1) for part in ("key", "value")},
    }
    assert result.notes == () and {site.spec.gain_offset for site in result.report.sites} == {1.0}
    assert "model.layers.0.self_attn.q_norm" in {site.module for site in result.report.sites}


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in MODELS if n != "gemma3"])
def test_cache_of_every_model(name: str, tmp_path: Path) -> None:
    """Each family decodes as PyTorch does; mixtures of experts go by transformers' own exporter, and that is said."""
    result = check_cached(name, tmp_path)
    said = [note for note in result.notes if note.startswith("exported by transformers' own exporter")]
    assert len(said) == (name in OWN_EXPORTER)
    assert all("its optimiser off, since translation to ONNX failed" in note for note in said)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "opset"), [("float16", 18), ("float32", 23), ("float16", 23)])
def test_cache_in_half_and_at_other_opsets(dtype: str, opset: int, tmp_path: Path) -> None:
    """A model is cast as transformers casts when it loads, and decodes at newer opsets too."""
    check_cached("qwen3", tmp_path, dtype, opset)


def test_other_exporter_is_named(tmp_path: Path) -> None:
    """What torch's exporter cannot take goes by transformers' own: named, with the reason, and epsilon is kept."""
    config = transformers.MixtralConfig(num_local_experts=4, rms_norm_eps=1e-9, **{**SMALL, "num_hidden_layers": 1})
    result = export_transformers(config)
    assert result.route == OWN and (result.report.found, result.report.rewritten) == (3, 3)
    [note] = result.notes
    assert note.startswith(
        "exported by transformers' own exporter, its optimiser off, since translation to ONNX failed"
    )
    assert {np.float32(site.spec.epsilon) for site in result.report.sites} == {np.float32(1e-9)}
    assert [v.name for v in result.model.graph.inputs] == ["input_ids", "attention_mask"]
    loaded = session(result, tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM._from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, VOCABULARY, (3, 5))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    got = loaded.run(None, {"input_ids": ids.numpy(), "attention_mask": np.ones((3, 5), np.int64)})[0]
    assert_close(got, wanted, "float32")


@pytest.mark.full
def test_encoders_and_translators(tmp_path: Path) -> None:
    """A model without a head gives last_hidden_state; an encoder-decoder takes decoder_input_ids."""
    torch.manual_seed(0)
    encoder = randomized(transformers.EuroBertModel(transformers.EuroBertConfig(**SMALL)))
    result = export_transformers(encoder)
    assert (result.report.found, result.report.declined) == (5, 0)
    assert [v.name for v in result.model.graph.outputs] == ["last_hidden_state"]
    ids, mask = torch.randint(3, VOCABULARY, (3, 5)), torch.ones(3, 5, dtype=torch.int64)
    mask[0, 3:] = 0
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    with torch.no_grad():
        wanted = encoder(input_ids=ids, attention_mask=mask)[0]
    assert_close(session(result, tmp_path).run(None, feeds)[0], wanted, "float32")

    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=VOCABULARY)
    translator = randomized(transformers.T5ForConditionalGeneration(config))
    result = export_transformers(translator)
    assert (result.report.found, result.report.declined) == (12, 0)
    target = torch.randint(3, VOCABULARY, (3, 4))
    feeds["decoder_input_ids"] = target.numpy()
    with torch.no_grad():
        wanted = translator(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
    assert_close(session(result, tmp_path).run(None, feeds)[0], wanted, "float32")
    with pytest.raises(ExportError, match="keeps a cache of its encoder's text too"):
        export_transformers(translator, cache=True)


@pytest.mark.full
def test_a_config_gives_the_same_weights_each_time() -> None:
    """Weights of a config are drawn from the seed; torch's own generator and the config stay as they were."""
    config = MODELS["llama"][0]()
    before, state = config.to_dict(), torch.random.get_rng_state()
    names = "model.layers.0.self_attn.q_proj.weight"
    first, second, other = (
        export_transformers(config, seed=seed).model.graph.initializers[names].const_value.numpy() for seed in (0, 0, 1)
    )
    assert np.array_equal(first, second) and not np.array_equal(first, other)
    assert config.to_dict() == before and torch.equal(torch.random.get_rng_state(), state)


def test_a_model_stays_as_it_is() -> None:
    """Casting and other attention are done to a copy; saved weights are cast, the rotary frequencies are not."""
    from rmsnorm_onnx.exporters.transformers import _read

    model = transformers.LlamaForCausalLM(MODELS["llama"][0]())  # sdpa, in training mode
    ours, notes = _read(model, "float16", 0)
    assert notes == () and not ours.training and ours.config._attn_implementation == "eager"
    assert {p.dtype for p in ours.parameters()} == {torch.float16}
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.training and model.config._attn_implementation == "sdpa" and "forward" not in vars(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_casts_are_those_of_loading(name: str) -> None:
    """A cast model is, tensor for tensor, what transformers loads in that type: T5 keeps some of it in float32."""
    from rmsnorm_onnx.exporters.transformers import _read

    t5 = transformers.T5Config(d_model=64, d_ff=128, num_layers=1, num_heads=4, d_kv=16, vocab_size=VOCABULARY)
    config = t5 if name.startswith("T5") else MODELS["llama"][0]()
    model = getattr(transformers, name)(config)
    loaded = type(model).from_pretrained(
        None, config=copy.deepcopy(config), state_dict=model.state_dict(), dtype=torch.float16
    )
    cast = _read(model, "float16", 0)[0].state_dict()
    wanted = loaded.state_dict()
    assert {n: t.dtype for n, t in cast.items()} == {n: t.dtype for n, t in wanted.items()}
    assert all(torch.equal(cast[n], wanted[n]) for n in wanted)
    if name.startswith("T5"):
        assert {t.dtype for t in wanted.values()} == {torch.float16, torch.float32}


def test_states_that_are_no_keys_and_values() -> None:
    """A model that keeps a recurrent state is refused a cache, with its layer's name."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(ExportError, match=r"Mamba\w* (keeps|gives|takes) .*leave cache off"):
        export_transformers(config, cache=True)


def test_a_changed_epsilon_is_an_error() -> None:
    """A norm with another epsilon than its module is refused, of a known class or not; the config's is noted."""
    from rmsnorm_onnx import exporters

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(rms_norm_eps=1e-5, **SMALL)).eval()
    module = copy.deepcopy(model)
    graph = exporters.export(module.model.layers[0].input_layernorm, torch.randn(2, 3, 64), fuse=False).model
    [add] = [node for node in graph.graph if node.op_type == "Add"]

    def owner(name: str) -> None:
        for node in graph.graph:
            node.metadata_props["pkg.torch.onnx.name_scopes"] = repr(["", name, "op"])

    def check() -> tuple[str, ...]:
        return epsilons.check(pairing.pair(graph, None, module, {})[0], module.config)

    owner("model.norm")
    assert check() == ()
    module.model.norm.variance_epsilon = 1e-6
    with pytest.raises(
        ExportError, match=r"is 9.99\d+e-06, and the LlamaRMSNorm model.norm that it comes from has 1e-06"
    ):
        check()
    owner("model.layers.0.mlp")
    module.model.layers[0].mlp.norm_eps = 1e-6
    with pytest.raises(ExportError, match=r"\(of model.layers.0.mlp\) has epsilon 1e-05 in the graph and 1e-06 in PyT"):
        check()
    owner("model.norm")
    module.config.rms_norm_eps = 1e-6
    module.model.norm.variance_epsilon = 1e-5
    assert check() == ("model.norm has epsilon 1e-05, the config 1e-06",)
    owner("lm_head")
    zero = ir.val("zero", const_value=ir.tensor(np.zeros(1, np.float32)), shape=ir.Shape([1]))
    zero.type = ir.TensorType(ir.DataType.FLOAT)
    add.replace_input_with(1, zero)
    graph.graph.register_initializer(zero)
    with pytest.raises(ExportError, match="has epsilon 0 in the graph and 1e-06 in PyTorch"):
        check()


def test_arguments_without_meaning(tmp_path: Path) -> None:
    """Sources that are none and types that are none are usage errors; nothing is written."""
    with pytest.raises(UsageError, match="a Linear is no transformers model; give one, its config, or a checkpoint's"):
        export_transformers(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="cannot export as 'int8'"):
        export_transformers(MODELS["llama"][0](), dtype="int8", output=tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_missing_transformers(tmp_path: Path) -> None:
    """Without transformers, the folder of a checkpoint ends with exit code 4 and the pip command."""
    (tmp_path / "config.json").write_text("{}")
    program = (
        "import sys; sys.modules['transformers'] = None; from rmsnorm_onnx.cli import main; "
        f"sys.exit(main(['export', {str(tmp_path)!r}, '-o', {str(tmp_path / 'm.onnx')!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 4 and not (tmp_path / "m.onnx").exists()
    assert "needs transformers: pip install 'rmsnorm_onnx[transformers]'" in ran.stderr


@pytest.mark.full
def test_norms_of_a_decoder_are_within_bounds() -> None:
    """Each norm of an exported decoder with a cache, run alone, is within its bound."""
    result = export_transformers(build("gemma3"), cache=True)
    report = verify(result.model)
    assert len(report.sites) == 13 and all(site.within for site in report.sites)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rotary_frequencies_stay_float32_in_a_half_type(dtype: str) -> None:
    """A float32 model that is converted has the frequencies of one that transformers makes in that type, to the bit."""
    config = transformers.LlamaConfig(**SMALL)
    wanted = getattr(torch, dtype)
    made = transformers.AutoModel.from_config(config, dtype=wanted)
    torch.manual_seed(3)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    half, _, _ = steps.converted(model, (), {}, dtype)
    assert {n: b.dtype for n, b in half.named_buffers()} == {n: b.dtype for n, b in made.named_buffers()}
    assert torch.equal(half.rotary_emb.inv_freq, made.rotary_emb.inv_freq)
    assert {p.dtype for p in half.parameters()} == {p.dtype for p in made.parameters()} == {wanted}
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float32}
    ids = torch.arange(16).reshape(2, 8)
    made.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(half(ids).last_hidden_state, made.eval()(ids).last_hidden_state)


def test_a_half_export_holds_the_frequencies_in_float32() -> None:
    """The file's frequencies are those of the float32 model, not rounded to half."""
    model = transformers.AutoModel.from_config(transformers.LlamaConfig(**SMALL), dtype=torch.float32).eval()
    model.config.use_cache = False

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids).last_hidden_state

    graph = export(Hidden(), (torch.arange(16).reshape(2, 8),), dtype="float16").model.graph
    [kept] = [v.const_value for name, v in graph.initializers.items() if name.endswith("rotary_emb.inv_freq")]
    assert kept.numpy().dtype == np.float32
    assert kept.numpy().tobytes() == model.rotary_emb.inv_freq.numpy().tobytes()
