"""Which classes of transformers have which form: their forwards are textual copies of a few.

The lists are literal, from a comparison of the source text of every norm class of transformers 5.24; a test holds each
class to its form's spec, numerically. A class that is on no list has no reader: those of one model with a form of
their own, factors without the product, and statistics that are no mean square (a sum, a variance).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FORMS: Mapping[str, str] = MappingProxyType(
    {
        # w * round(x / rms): LlamaRMSNorm, word for word but for names.
        "llama": """
            aimv2.Aimv2RMSNorm apertus.ApertusRMSNorm apertus1p5.Apertus1p5TextRMSNorm arcee.ArceeRMSNorm
            aria.AriaTextRMSNorm axk1.AXK1RMSNorm axk2.AXK2RMSNorm bailing_hybrid.BailingHybridRMSNorm
            bamba.BambaRMSNorm bitnet.BitNetRMSNorm blt.BltRMSNorm chameleon.ChameleonRMSNorm clvp.ClvpRMSNorm
            cohere2_moe.Cohere2MoeRMSNorm cosmos3_edge.Cosmos3EdgeTextRMSNorm cpmant.CpmAntLayerNorm
            csm.CsmRMSNorm cwm.CwmRMSNorm deepseek_ocr2.DeepseekOcr2TextRMSNorm
            deepseek_ocr2.DeepseekOcr2VisionRMSNorm deepseek_v2.DeepseekV2RMSNorm deepseek_v3.DeepseekV3RMSNorm
            deepseek_v32.DeepseekV32RMSNorm deimv2.Deimv2RMSNorm dia.DiaRMSNorm diffllama.DiffLlamaRMSNorm
            doge.DogeRMSNorm dots1.Dots1RMSNorm dots3_note.Dots3NoteRMSNorm emu3.Emu3RMSNorm
            ernie4_5.Ernie4_5RMSNorm ernie4_5_moe.Ernie4_5_MoeRMSNorm ernie4_5_vl_moe.Ernie4_5_VLMoeRMSNorm
            eurobert.EuroBertRMSNorm evolla.EvollaRMSNorm exaone4.Exaone4RMSNorm exaone4_5.Exaone4_5_RMSNorm
            exaone_moe.ExaoneMoeRMSNorm falcon_h1.FalconH1RMSNorm falcon_mamba.FalconMambaRMSNorm glm.GlmRMSNorm
            glm4.Glm4RMSNorm glm4_moe.Glm4MoeRMSNorm glm4_moe_lite.Glm4MoeLiteRMSNorm glm4v.Glm4vRMSNorm
            glm4v_moe.Glm4vMoeRMSNorm glm4v_moe.Glm4vMoeTextRMSNorm glm5_next.Glm5NextRMSNorm
            glm5_next.Glm5NextTextRMSNorm glm_image.GlmImageRMSNorm glm_moe_dsa.GlmMoeDsaRMSNorm
            glm_ocr.GlmOcrRMSNorm granite.GraniteRMSNorm granite4_vision.Granite4VisionTextRMSNorm
            granite_docling.GraniteDoclingTextRMSNorm granite_swa.GraniteSWARMSNorm granitemoe.GraniteMoeRMSNorm
            granitemoe_swa.GraniteMoeSWARMSNorm granitemoehybrid.GraniteMoeHybridRMSNorm
            granitemoeshared.GraniteMoeSharedRMSNorm higgs_audio_v2.HiggsAudioV2RMSNorm
            hunyuan_v1_dense.HunYuanDenseV1RMSNorm hunyuan_v1_moe.HunYuanMoEV1RMSNorm
            hunyuan_vl.HunYuanVLRMSNorm hy_v3.HYV3RMSNorm hy_v4.HYV4RMSNorm hy_v4_vl.HYV4VLRMSNorm
            hyperclovax.HyperCLOVAXRMSNorm idefics2.Idefics2RMSNorm idefics3.Idefics3RMSNorm
            inkling.InklingRMSNorm internvl.InternVLVisionRMSNorm jamba.JambaRMSNorm jetmoe.JetMoeRMSNorm
            kimi_linear.KimiLinearRMSNorm kolibri1.Kolibri1RMSNorm laguna.LagunaRMSNorm lfm2.Lfm2RMSNorm
            lfm2_moe.Lfm2MoeRMSNorm lfm3.Lfm3RMSNorm lfm3_vl.Lfm3VlVisionRMSNorm lighton_ocr.LightOnOcrRMSNorm
            llama.LlamaRMSNorm llama4.Llama4TextRMSNorm longcat_flash.LongcatFlashRMSNorm mamba.MambaRMSNorm
            mamba2.Mamba2RMSNorm mellum.MellumRMSNorm mimo_v2_flash.MiMoV2FlashRMSNorm minicpm3.MiniCPM3RMSNorm
            minimax.MiniMaxRMSNorm minimax_m2.MiniMaxM2RMSNorm ministral.MinistralRMSNorm
            ministral3.Ministral3RMSNorm mistral.MistralRMSNorm mistral3.Mistral3RMSNorm
            mistral4.Mistral4RMSNorm mistral_large4.MistralLarge4RMSNorm mixtral.MixtralRMSNorm
            mllama.MllamaTextRMSNorm molmo2.Molmo2RMSNorm muse_glimmer_assistant.MuseGlimmerAssistantRMSNorm
            neucodec.NeuCodecRMSNorm olmoe.OlmoeRMSNorm ovis2.Ovis2RMSNorm paddleocr_vl.PaddleOCRRMSNorm
            pe_audio.PeAudioEncoderRMSNorm pe_audio_video.PeAudioVideoEncoderRMSNorm
            pe_video.PeVideoEncoderRMSNorm phi3.Phi3RMSNorm phi4_multimodal.Phi4MultimodalRMSNorm
            pixtral.PixtralRMSNorm qianfan_ocr.QianfanOCRVisionRMSNorm qwen2.Qwen2RMSNorm
            qwen2_5_omni.Qwen2_5OmniRMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm qwen2_moe.Qwen2MoeRMSNorm
            qwen2_vl.Qwen2VLRMSNorm qwen3.Qwen3RMSNorm qwen3_moe.Qwen3MoeRMSNorm
            qwen3_omni_moe.Qwen3OmniMoeCode2WavRMSNorm qwen3_omni_moe.Qwen3OmniMoeRMSNorm
            qwen3_omni_moe.Qwen3OmniMoeTextRMSNorm qwen3_omni_moe.Qwen3OmniMoeThinkerTextRMSNorm
            qwen3_vl.Qwen3VLTextRMSNorm qwen3_vl_moe.Qwen3VLMoeTextRMSNorm sapiens2.Sapiens2RMSNorm
            seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm solar_open.SolarOpenRMSNorm timesfm.TimesFmRMSNorm
            timesfm2_5.TimesFm2_5RMSNorm ultrabert.UltrabertRMSNorm ultravbert.UltraVBertRMSNorm
            unlimited_ocr.UnlimitedOcrTextRMSNorm vibevoice.VibeVoiceRMSNorm
            vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerRMSNorm vibevoice_asr.VibeVoiceAsrRMSNorm
            voxtral_realtime.VoxtralRealtimeRMSNorm xcodec2.Xcodec2RMSNorm youtu.YoutuRMSNorm zamba.ZambaRMSNorm
            zamba2.Zamba2RMSNorm zaya.ZayaRMSNorm
        """,
        # round(w * x / rms): Olmo2RMSNorm.
        "olmo": """
            afmoe.AfmoeRMSNorm beam.BeamRMSNorm deepseek_v4.DeepseekV4RMSNorm flex_olmo.FlexOlmoRMSNorm
            flint.FlintRMSNorm gpt_oss.GptOssRMSNorm inkling2.Inkling2RMSNorm inkling2_loop.Inkling2LoopRMSNorm
            olmo2.Olmo2RMSNorm olmo3.Olmo3RMSNorm olmo_hybrid.OlmoHybridRMSNorm
            openai_privacy_filter.OpenAIPrivacyFilterRMSNorm
        """,
        # round(w * x / rms) with w cast to float32: HeliumRMSNorm, MoshiRMSNorm.
        "helium": """
            helium.HeliumRMSNorm kyutai_speech_to_text.KyutaiSpeechToTextRMSNorm lara_mini.LaraMiniRMSNorm
            moshi.MoshiRMSNorm nemotron_h.NemotronHRMSNorm nemotron_h_omni.NemotronH_Omni_RMSNorm
        """,
        # round((1 + w) * x / rms) with w cast to float32: GemmaRMSNorm.
        "gemma": """
            gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm minimax_m3_vl.MiniMaxM3VLRMSNorm
            muse_glimmer.MuseGlimmerTextCenteredRMSNorm qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm
            qwen3_next.Qwen3NextRMSNorm recurrent_gemma.RecurrentGemmaRMSNorm step3p7.Step3p7RMSNorm
            t5gemma.T5GemmaRMSNorm t5gemma2.T5Gemma2RMSNorm vaultgemma.VaultGemmaRMSNorm
        """,
        # round(w * x / rms) by a power of -0.5, the gain optional: Gemma4RMSNorm.
        "gemma4": """
            diffusion_gemma.DiffusionGemmaRMSNorm embedding_gemma2.EmbeddingGemma2RMSNorm gemma3n.Gemma3nRMSNorm
            gemma4.Gemma4RMSNorm gemma4_unified.Gemma4UnifiedRMSNorm muse_glimmer.MuseGlimmerRMSNorm
            muse_spark.MuseSparkRMSNorm neomme.NeoMMERMSNorm
        """,
        # w * round(x / rms), x not cast, rounded to the type of w: T5LayerNorm.
        "t5": """
            idefics.IdeficsRMSNorm kosmos2_5.Kosmos2_5LayerNorm longt5.LongT5LayerNorm mt5.MT5LayerNorm
            pix2struct.Pix2StructLayerNorm pop2piano.Pop2PianoLayerNorm
            switch_transformers.SwitchTransformersLayerNorm t5.T5LayerNorm udop.UdopLayerNorm umt5.UMT5LayerNorm
        """,
        # round(x / rms), no gain: Llama4TextL2Norm.
        "bare": """
            esmfold2.EsmFold2RMSNorm falcon_mamba.FalconMambaWeightlessRMSNorm hrm_text.HrmTextRMSNorm
            inkling2.Inkling2UnweightedRMSNorm inkling2_loop.Inkling2LoopUnweightedRMSNorm
            llama4.Llama4TextL2Norm nanochat.NanoChatRMSNorm
        """,
        # x * round(1 / rms), no gain: DeepseekV4UnweightedRMSNorm.
        "rounded_factor": """
            deepseek_v4.DeepseekV4UnweightedRMSNorm glm5_next.Glm5NextTextUnweightedRMSNorm
        """,
        # w * round(x / rms) in groups, where x is the product with a gate, in float32: MambaRMSNormGated.
        "gate_first": """
            bamba.BambaRMSNormGated granitemoehybrid.GraniteMoeHybridRMSNormGated mamba2.MambaRMSNormGated
            nemotron_h.NemotronHRMSNormGated zamba2.Zamba2RMSNormGated
        """,
        # Llama's form, then times a gate: Qwen3NextRMSNormGated.
        "gate_last": """
            olmo_hybrid.OlmoHybridRMSNormGated qwen3_5.Qwen3_5RMSNormGated qwen3_5_moe.Qwen3_5MoeRMSNormGated
            qwen3_next.Qwen3NextRMSNormGated qwen4_exp.Qwen4ExpTextRMSNormGated
        """,
        # Helium's form, then times a gate before it is rounded: KimiLinearRMSNormGated.
        "gate_last_wide": """
            bailing_hybrid.BailingHybridRMSNormGated glm5_next.Glm5NextTextRMSNormGated
            kimi_linear.KimiLinearRMSNormGated lara_mini.LaraMiniRMSNormGated
        """,
        # LayerNorm: the mean is subtracted first.
        "layer_norm": """
            cohere.CohereLayerNorm cohere2.Cohere2LayerNorm cohere2_moe.Cohere2MoeLayerNorm
            cohere_compass.CohereCompassLayerNorm deberta.DebertaLayerNorm
            gradium_phonon_tts.GradiumPhononTTSFlowLayerNorm nemotron.NemotronLayerNorm1P
            pocket_tts.PocketTTSFlowLayerNorm
        """,
    }
)
"""Form to classes, each as "model.Class" of transformers.models."""


def classes(form: str) -> list[str]:
    """The full names of the classes of a form.

    >>> classes("rounded_factor")[0]
    'transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4UnweightedRMSNorm'
    """
    pairs = (name.split(".") for name in FORMS[form].split())
    return [f"transformers.models.{model}.modeling_{model}.{kind}" for model, kind in pairs]
