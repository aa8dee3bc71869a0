"""`ModelArguments`: which checkpoint, head and parameters a recipe fine-tunes.

A recipe is a flat YAML file whose keys are the fields of three dataclasses: `ModelArguments` here,
`hf_dpzero.tasks.description.DataArguments` for the rows, and `hf_dpzero.settings.config.DPZeroConfig`
for everything about training and privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_dpzero.values import one_of, positive

Architecture = Literal["auto", "sentence_classifier"]
Pooling = Literal["mean", "cls", "last"]
HeadInit = Literal["random", "zero", "label_text"]
PairFeatures = Literal["joint", "siamese"]
PeftMethod = Literal["lora", "bitfit", "prefix"]
_CHOICES: dict[str, tuple[tuple[str | None, ...], str]] = {
    "torch_dtype": (("float32", "bfloat16", "float16", "auto"), "auto takes the checkpoint's"),
    "architecture": (get_args(Architecture), "auto suits whole checkpoints"),
    "pooling": (get_args(Pooling), "sentence encoders mostly use mean, decoders last"),
    "pair_features": (get_args(PairFeatures), "siamese encodes each text alone"),
    "head_init": (get_args(HeadInit), "random is HF's own"),
    "peft_method": ((None, *get_args(PeftMethod)), "null trains the model"),
}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words that `from_pretrained` takes for a map."""


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Which checkpoint, which head, which parameters a recipe fine-tunes.

    Attributes:
      model_name_or_path: Hub id or local folder of the base model; `package:NAME/SUBFOLDER` is the
        folder SUBFOLDER inside the installed Python package NAME (weights that come through pip).
      model_revision: Hub branch, tag or commit; pin a commit to reproduce a number.
      torch_dtype: "float32" (default), "bfloat16", "float16", or "auto": the one that the
        checkpoint was saved in. Parameters of all three can be trained; adapters are float32 in any
        case. bfloat16 has float32's range; float16 has the finer steps and overflows beyond 65504,
        and an example whose loss is not finite counts as zero.
      load_in_4bit: quantise the frozen base to 4 bits (NormalFloat, as QLoRA); sums are computed in
        torch_dtype. Needs bitsandbytes (the extra `quantization`) and peft_method lora or prefix.
      load_in_8bit: the same in 8 bits (LLM.int8()); products are computed in float16, so
        torch_dtype: float16 saves conversions.
      device_map: "auto" spreads the model over the GPUs of one process and offloads what does not
        fit to CPU memory, then to offload_folder; a mapping says it by module, {model.embed_tokens:
        0, model.layers: cpu, lm_head: disk}. Zeroth-order methods only.
      offload_folder: on a disk with room for the offloaded weights, twice where they train.
      max_memory: what device_map="auto" may take of each, {0: 20GiB, cpu: 100GiB}.
      architecture: "auto" takes the `AutoModelFor...` class of the task; "sentence_classifier" puts
        pooling and a linear head on a bare encoder.
      pooling: of a sentence_classifier: "mean" over the attended tokens, the first ("cls"), or the
        last ("last"), which alone has read the whole text in a decoder.
      normalize: scale the pooled vector to Euclidean length 1 before the head; with components,
        what they leave of it.
      features: the hidden states that are pooled: "last"; "all_layers", side by side, embeddings
        first; or numbers of layers with commas, "18,22,26", 0 the embeddings. sentence_classifier
        only.
      components: the head sees so many principal components of the pooled vector, each coordinate
        standardised and each component divided by the fourth root of its variance. Fitted once on
        public_file, kept with the model.
      public_file: more texts than `components`, in the task's columns, labels not needed; public:
        none is the text of a training row.
      pair_features: what the head sees of a pair of texts: "joint" encodes both as one sequence;
        "siamese" encodes each alone, to a and b, and shows the head [a; b; |a - b|; a * b], four
        times as wide (Conneau et al. 2017, InferSent). sentence_classifier only; what a frozen
        sentence encoder needs.
      head_init: start of the linear head: "random" (HF's initialiser), "zero", or "label_text": row
        c is the embedding of `label_texts[c]`, which gives a zero-shot classifier
        (sentence_classifier only).
      label_texts: one description for each label, in label order; for head_init=label_text. An
        entry may hold several phrasings separated by "|", whose embeddings are averaged.
      logit_scale: the head's logits are multiplied by this; > 0. sentence_classifier only.
      peft_method: null trains what `trainable` selects: `^classifier` is the head of a
        sentence_classifier alone, `layer\\.5\\.|^classifier` the last of six BERT layers and the
        head; "lora" trains adapters and the head, "bitfit" the biases and the head, "prefix" a
        prefix and the head. With a prompt there is no new head, and the output matrix stays as it
        is.
      lora_r: rank of the LoRA matrices, >= 1.
      lora_alpha: LoRA scale; the adapter is multiplied by lora_alpha / lora_r.
      lora_target_modules: module names that get LoRA.
      num_virtual_tokens: length m of the trained prefix, >= 1; for peft_method=prefix. With a
        prompt it starts as the keys and values of m tokens drawn by `init_seed` (Li & Liang 2021),
        otherwise at N(0, 1). It takes m of the model's positions.
      init_seed: seed of freshly drawn weights (random head, adapters).
      precompute_features: run a frozen encoder once over the data and train the rest on the stored
        vectors.
    """

    model_name_or_path: str
    model_revision: str | None = None
    torch_dtype: str = "float32"
    device_map: dict[str, Any] | str | None = None
    offload_folder: str | None = None
    max_memory: dict[Any, Any] | str | None = None
    architecture: Architecture = "auto"
    pooling: Pooling = "mean"
    normalize: bool = True
    features: str = "last"
    components: int | None = None
    public_file: str | None = None
    pair_features: PairFeatures = "joint"
    head_init: HeadInit = "random"
    label_texts: list[str] | None = None
    logit_scale: float = 1.0
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    peft_method: PeftMethod | None = None
    lora_r: int = 8
    lora_alpha: float = 16.0
    lora_target_modules: list[str] | None = None
    num_virtual_tokens: int = 5
    init_seed: int = 0
    precompute_features: bool = False

    def __post_init__(self) -> None:
        for name, (choices, hint) in _CHOICES.items():
            one_of(self, name, choices, hint)
        positive(self, "logit_scale", "lora_r", "lora_alpha", "num_virtual_tokens", "components")
        self._check_features()
        self._check_placement()
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit are both set; set one of them.")
        if self.quantised and self.peft_method not in ("lora", "prefix"):
            raise ValueError(
                f"load_in_{self.quantised}bit=True with peft_method={self.peft_method or 'null'}: a "
                "quantised base cannot be trained itself; set peft_method: lora (or prefix), which "
                "trains float32 weights on top of it."
            )
        if self.head_init == "label_text" and not self.label_texts:
            raise ValueError(
                "head_init='label_text' needs label_texts, one description for each label; "
                "add them, or set head_init to random or zero."
            )
        if self.head_init == "label_text" and self.pair_features == "siamese":
            raise ValueError(
                "head_init='label_text' describes one text, and with pair_features='siamese' the "
                "head compares two: set head_init to zero or random, or pair_features to joint."
            )

    def _check_features(self) -> None:
        """Refuses layers that are none, and public text without components or the other way round."""
        numbers = self.features.split(",")
        whole = all(number.strip().isdecimal() for number in numbers)
        if self.features not in ("last", "all_layers") and not whole:
            raise ValueError(
                f"features={self.features!r} is not last, all_layers or numbers of layers with commas, "
                "such as 18,22,26."
            )
        if (self.components is None) != (self.public_file is None):
            absent = "components" if self.components is None else "public_file"
            raise ValueError(
                f"components={self.components!r} and public_file={self.public_file!r}: components are "
                f"fitted on public text, so one needs the other; set {absent}, or leave out both."
            )
        if self.components is None:
            return
        if self.pair_features == "siamese" or self.head_init == "label_text":
            name = "pair_features" if self.pair_features == "siamese" else "head_init"
            raise ValueError(
                f"{name}={getattr(self, name)!r} with components={self.components}: components are of "
                "whole rows; set pair_features: joint and head_init: zero, or leave components out."
            )
        if not self.precompute_features:
            raise ValueError(
                f"components={self.components} are fitted to a frozen encoder: set precompute_features: "
                "true (and trainable: ^classifier)."
            )

    def _check_placement(self) -> None:
        """Refuses maps that are none, and those of models that are moved or packed as a whole."""
        if isinstance(self.device_map, str) and self.device_map not in DEVICE_MAPS:
            raise ValueError(
                f"device_map={self.device_map!r} is none of {', '.join(DEVICE_MAPS)}: name one, or map "
                "modules to devices, {transformer: cpu, lm_head: 0}."
            )
        if isinstance(self.max_memory, str):
            raise ValueError(
                f"max_memory={self.max_memory!r} is no mapping: {{0: 20GiB, cpu: 100GiB}}."
            )
        if self.device_map is None:  # what is below is about weights that live in several places
            return
        places = set(self.device_map.values()) if isinstance(self.device_map, dict) else set()
        if "disk" in places and self.offload_folder is None:
            raise ValueError("device_map names the disk: set offload_folder, where there is room.")
        if self.quantised:
            raise ValueError(
                f"device_map with load_in_{self.quantised}bit=True: quantised layers are not offloaded, "
                "and a quantised base goes to one GPU by itself: leave one of the two out."
            )
        if self.architecture != "auto":
            raise ValueError(
                f"device_map with architecture={self.architecture!r}, whose encoder is moved as a "
                "whole: use architecture: auto, or leave device_map out."
            )

    @property
    def vector_settings(self) -> dict[str, Any]:
        """What `SentenceClassifierConfig` takes of these."""
        names = ("pooling", "normalize", "features", "components", "logit_scale", "pair_features")
        return {name: getattr(self, name) for name in names}

    @property
    def quantised(self) -> int:
        """Bits of the quantised base, 4 or 8; 0 where it is not quantised."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0
