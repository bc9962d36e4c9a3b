"""Words of other frameworks for fields of the manifest: the one table of messages and docs/coming-from.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from pydantic.alias_generators import to_camel, to_snake


def spelled(name: str) -> str:
    """A name as the manifest spells it: groupSize for group_size."""
    return to_camel(to_snake(name.rstrip("_")))


class Word(NamedTuple):
    """A setting of another framework and the field that is meant."""

    source: str
    """Frameworks that have it."""
    theirs: str
    """Its name there; dotted where one name alone could be anything."""
    ours: str
    """Field of an AgentRLJob below `spec`; empty if there is none."""
    difference: str = ""
    """What differs in the value, and without a field what to do."""
    sft: str = ""
    """Field of an SFTJob below `spec`; empty if there is none."""

    @property
    def names(self) -> list[str]:
        """The parts of its name as the manifest would spell them."""
        return [spelled(part) for part in self.theirs.split(".")]

    def meaning(self, kind: str) -> str:
        """What to write in its place in a manifest of a kind; empty if nothing is known for the kind."""
        if kind == "SFTJob":
            return f"did you mean spec.{self.sft} ({self.theirs} of {self.source})?" if self.sft else ""
        word = "; ".join(filter(None, [f"{self.theirs} of {self.source}", self.difference]))
        return f"did you mean spec.{self.ours} ({word})?" if self.ours else word


WORDS: Sequence[Word] = (
    Word("TRL", "model_name_or_path", "model.base", "hf://ORG/NAME, or a folder", "model.base"),
    Word("verl", "model.path", "model.base", "hf://ORG/NAME, or a folder", "model.base"),
    Word("ART", "base_model", "model.base", "hf://ORG/NAME, or a folder", "model.base"),
    Word("PEFT", "peft_config", "model.adapter", "", "model.adapter"),
    Word("PEFT, verl", "lora", "model.adapter", "", "model.adapter"),
    Word("PEFT", "lora_config", "model.adapter", "", "model.adapter"),
    Word("TRL", "lora_r", "model.adapter.rank", "", "model.adapter.rank"),
    Word("verl", "lora_rank", "model.adapter.rank", "", "model.adapter.rank"),
    Word("PEFT", "r", "model.adapter.rank", "", "model.adapter.rank"),
    Word("PEFT, TRL, verl", "lora_alpha", "model.adapter.alpha", "", "model.adapter.alpha"),
    Word("PEFT, verl", "target_modules", "model.adapter.targets", "", "model.adapter.targets"),
    Word("TRL", "lora_target_modules", "model.adapter.targets", "", "model.adapter.targets"),
    Word("verl", "lora_adapter_path", "model.adapter.from", "the address of a published adapter", "model.adapter.from"),
    Word("PEFT, TRL", "lora_dropout", "", "adapters have no dropout: remove it"),
    Word("TRL", "bf16", "model.dtype", "bfloat16 in place of true", "model.dtype"),
    Word("TRL", "torch_dtype", "model.dtype", "", "model.dtype"),
    Word("TRL", "train_dataset", "data.train.uri", "a .jsonl or .parquet file", "data.train.uri"),
    Word("verl", "train_files", "data.train.uri", "one file", "data.train.uri"),
    Word("TRL", "eval_dataset", "data.validation.uri", "a .jsonl or .parquet file", "data.validation.uri"),
    Word("verl", "val_files", "data.validation.uri", "one file", "data.validation.uri"),
    Word("verl", "train_max_samples", "data.train.size", "unset in place of -1", "data.train.size"),
    Word("TRL", "reward_funcs", "rewards", "each is an item with `rule`"),
    Word("TRL", "reward_weights", "rewards[].weight", "one beside each rule"),
    Word("TRL", "num_generations", "algorithm.groupSize"),
    Word("verl", "rollout.n", "algorithm.groupSize", "1 there by default"),
    Word("ART", "rollouts_per_group", "algorithm.groupSize"),
    Word("verl", "train_batch_size", "algorithm.groupsPerStep", "", "training.batchSize"),
    Word(
        "TRL",
        "per_device_train_batch_size",
        "algorithm.groupsPerStep",
        "groups in place of episodes: theirs x devices x accumulation steps / num_generations",
        "training.batchSize",
    ),
    Word(
        "TRL",
        "gradient_accumulation_steps",
        "learner.tokensPerPass",
        "passes are cut by tokens; what a step learns from does not change",
        "learner.tokensPerPass",
    ),
    Word("TRL, ART", "learning_rate", "algorithm.learningRate", "1e-6 there for TRL's GRPO", "training.learningRate"),
    Word("verl", "lr", "algorithm.learningRate", "1e-6 there by default", "training.learningRate"),
    Word("TRL", "lr_scheduler_type", "algorithm.learningRateSchedule", "", "training.learningRateSchedule"),
    Word("TRL", "warmup_ratio", "algorithm.warmupSteps", "steps in place of a share", "training.warmupSteps"),
    Word("verl", "lr_warmup_steps", "algorithm.warmupSteps", "0 in place of -1", "training.warmupSteps"),
    Word("verl", "grad_clip", "algorithm.maxGradNorm", "", "training.maxGradNorm"),
    Word("TRL, ART", "beta", "algorithm.kl.coefficient", "estimator k3 in the loss is TRL's formula"),
    Word("verl", "kl_loss_coef", "algorithm.kl.coefficient", "only with use_kl_loss there"),
    Word("verl", "kl_loss_type", "algorithm.kl.estimator", "kl is k1, mse is k2, low_var_kl is k3"),
    Word("TRL, ART", "epsilon", "algorithm.clip.low", "unset, clip.high is the preset's and not this value"),
    Word("TRL, ART", "epsilon_high", "algorithm.clip.high"),
    Word("verl", "clip_ratio", "algorithm.clip.low", "unset, clip.high is the preset's and not this value"),
    Word("verl", "clip_ratio_low", "algorithm.clip.low"),
    Word("verl", "clip_ratio_high", "algorithm.clip.high"),
    Word("TRL", "delta", "algorithm.clip.dual"),
    Word("verl", "clip_ratio_c", "algorithm.clip.dual", "3.0 there by default and none here"),
    Word(
        "TRL",
        "loss_type",
        "algorithm.aggregation",
        "dapo is token_mean, grpo is seq_mean_token_mean, dr_grpo is seq_mean_token_sum_norm",
    ),
    Word("verl", "loss_agg_mode", "algorithm.aggregation", "token_mean in place of token-mean, and so on"),
    Word("verl", "adv_estimator", "algorithm.advantage", "without gae, as there is no critic"),
    Word("TRL", "scale_rewards", "algorithm.advantage", "dr_grpo in place of false"),
    Word("verl", "norm_adv_by_std_in_grpo", "algorithm.advantage", "dr_grpo in place of false"),
    Word("TRL, ART", "importance_sampling_level", "algorithm.name", "gspo in place of sequence"),
    Word("verl", "filter_groups.enable", "algorithm.dynamicSampling"),
    Word("verl", "filter_groups.max_num_gen_batches", "algorithm.maxSampledBatches"),
    Word("TRL", "num_iterations", "algorithm.miniBatchEpochs"),
    Word("verl", "ppo_epochs", "algorithm.miniBatchEpochs"),
    Word("TRL", "steps_per_generation", "algorithm.miniBatches"),
    Word("verl", "ppo_mini_batch_size", "algorithm.miniBatches", "their number: train_batch_size / theirs"),
    Word(
        "TRL",
        "vllm_importance_sampling_correction",
        "algorithm.correction",
        "on where the learner's own log-probs are the old ones",
    ),
    Word("TRL", "vllm_importance_sampling_clip_max", "algorithm.correction.cap"),
    Word("verl", "rollout_is_threshold", "algorithm.correction.cap"),
    Word("TRL", "num_train_epochs", "schedule.epochs", "3 there by default", "training.epochs"),
    Word("verl", "total_epochs", "schedule.epochs", "30 there by default", "training.epochs"),
    Word("ART", "num_epochs", "schedule.epochs", "", "training.epochs"),
    Word("verl", "total_training_steps", "schedule.maxSteps", "", "training.maxSteps"),
    Word("TRL", "eval_steps", "schedule.evalEvery", "", "training.evalEvery"),
    Word("verl", "test_freq", "schedule.evalEvery", "unset in place of -1", "training.evalEvery"),
    Word("TRL", "save_steps", "schedule.checkpointEvery", "", "training.checkpointEvery"),
    Word("verl", "save_freq", "schedule.checkpointEvery", "unset in place of -1", "training.checkpointEvery"),
    Word("TRL", "save_total_limit", "schedule.keepCheckpoints"),
    Word("verl", "async_training.partial_rollout", "schedule.staleGroups", "continue in place of true"),
    Word("TRL", "output_dir", "storage.uri", "file:///FOLDER; unset, the folder of the run", "storage.uri"),
    Word("TRL", "temperature", "sampling.temperature"),
    Word("verl", "val_kwargs.n", "evaluation.samples"),
    Word("verl", "val_kwargs.temperature", "evaluation.temperature"),
    Word("verl", "val_kwargs.top_p", "evaluation.topP"),
    Word("verl", "val_kwargs.top_k", "evaluation.topK", "0 in place of -1"),
    Word("TRL", "max_completion_length", "agent.maxTokens", "all turns of an episode together"),
    Word("verl", "max_response_length", "agent.maxTokens", "all turns of an episode together"),
    Word("verl", "max_prompt_length", "inference.contextLength", "prompt and completions together"),
    Word("TRL", "max_length", "inference.contextLength", "prompt and completions together", "training.maxTokens"),
    Word("TRL", "max_tool_calling_iterations", "agent.maxTurns", "one more, for the answer"),
    Word("verl", "max_assistant_turns", "agent.maxTurns"),
    Word("verl", "max_tool_response_length", "agent.maxToolTokens", "tokens in place of characters"),
    Word("TRL", "chat_template_kwargs", "agent.template.arguments", "", "templateArguments"),
    Word("verl", "apply_chat_template_kwargs", "agent.template.arguments", "", "templateArguments"),
    Word("TRL", "vllm_max_model_length", "inference.contextLength"),
    Word("verl, vLLM", "max_model_len", "inference.contextLength"),
    Word("TRL", "vllm_tensor_parallel_size", "inference.accelerator.count"),
    Word("verl", "tensor_model_parallel_size", "inference.accelerator.count"),
    Word("TRL", "vllm_gpu_memory_utilization", "inference.args", "{gpu-memory-utilization: SHARE}"),
    Word("verl, vLLM", "gpu_memory_utilization", "inference.args", "{gpu-memory-utilization: SHARE}"),
    Word("verl, vLLM", "max_num_seqs", "inference.args", "{max-num-seqs: NUMBER}"),
    Word("verl", "rollout.name", "inference.engine", "vllm or sglang"),
    Word("SGLang", "tp_size", "inference.accelerator.count"),
    Word("SGLang", "mem_fraction_static", "inference.args", "{mem-fraction-static: SHARE}"),
    Word("SGLang", "max_running_requests", "inference.args", "{max-running-requests: NUMBER}"),
    Word("verl", "n_gpus_per_node", "learner.accelerator.count", "the learner's alone", "learner.accelerator.count"),
    Word("verl", "nnodes", "learner.replicas", "the learner's alone"),
)
"""All words; where two match, the longer one is meant."""

MOST_PLACES = 500
"""Members of one unknown object that are looked up."""


def word_of(path: Sequence[str]) -> Word | None:
    """The word that a path of names ends with, in either spelling."""
    names = [spelled(name) for name in path]
    matching = [word for word in WORDS if names[-len(parts := word.names) :] == parts]
    return max(matching, key=lambda word: word.theirs.count("."), default=None)


def words_in(path: Sequence[str], value: object) -> list[tuple[tuple[str, ...], Word]]:
    """The words at a path and in the object there, with their own paths."""
    words: list[tuple[tuple[str, ...], Word]] = []
    places: list[tuple[tuple[str, ...], object]] = [(tuple(path), value)]
    for names, section in places:
        word = word_of(names)
        if word is not None:
            words.append((names, word))
        if isinstance(section, Mapping):
            members = cast("Mapping[object, object]", section)
            below = [((*names, name), member) for name, member in members.items() if isinstance(name, str)]
            places += below[: max(0, MOST_PLACES - len(places))]
    return words


def table() -> str:
    """The words as a table of Markdown, for docs/coming-from.md."""
    rows = [
        f"| {word.source} | `{word.theirs}` | {f'`{word.ours}`' if word.ours else '-'} | {word.difference or '-'} |"
        for word in WORDS
    ]
    return "\n".join(["| in | theirs | here | difference in value |", "|---|---|---|---|", *rows])
