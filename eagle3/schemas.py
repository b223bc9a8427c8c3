"""The columns of every Parquet file and the tensors of a shard, one sentence each.

Letters: T tokens of a shard, N samples of a shard, A auxiliary layers, H hidden size.
"""

import pyarrow as pa

SCHEMA_VERSION = 1

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

#: data/prompts/{train,validation,evaluation}.parquet: one row per prompt, in a fixed order.
PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),  # sha256 of the messages
        ("source", pa.string()),  # prompts.sources[].name
        ("source_row", pa.int64()),  # 1-based row of the source file
        ("category", pa.string()),  # from the row, or the source's
        ("split", pa.string()),  # train | validation | evaluation
        ("messages", pa.list_(MESSAGE)),  # what the verifier is asked; ends with a user turn
        ("reference", pa.string()),  # the human answer, if the source has one
    ]
)

#: data/prompts/contamination.parquet: training prompts that hold much of an evaluation prompt.
CONTAMINATION = pa.schema(
    [
        ("prompt_id", pa.string()),  # of the training prompt
        ("split", pa.string()),  # train | validation
        ("source", pa.string()),  # of the training prompt
        ("evaluation_prompt_id", pa.string()),  # the one that it repeats
        ("share", pa.float64()),  # of the evaluation prompt's runs of words that this prompt has too
        ("text", pa.string()),  # the beginning of the training prompt
        ("evaluation_text", pa.string()),  # the beginning of the other
    ]
)

#: data/responses/part-*.parquet: one row per answered prompt, in prompt order.
RESPONSES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),  # 0, 1 ... of generate.samples_per_prompt
        ("source", pa.string()),
        ("category", pa.string()),
        ("split", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("reference", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),  # the ids that the engine read, verbatim; null = none are known
        (
            "output_token_ids",
            pa.list_(pa.int32()),
        ),  # the ids that the engine wrote, verbatim, stop token included; null too
        ("reasoning", pa.string()),  # as the server parsed it; informational, ids are the truth
        ("content", pa.string()),  # as the server parsed it; informational
        ("finish_reason", pa.string()),  # stop | length
        ("stop_reason", pa.string()),  # stop id or string as text, if the server named one
        ("prompt_tokens", pa.int32()),  # usage as the server counted it; null = no server did
        ("completion_tokens", pa.int32()),  # likewise
        ("latency_s", pa.float64()),  # from sending the request to the whole answer
        ("attempts", pa.int32()),  # 1 = answered at the first try
        ("sampling", pa.string()),  # canonical JSON of every sampling field that was sent, seed included
        ("chat_template_kwargs", pa.string()),  # canonical JSON, as sent
        ("verifier_digest", pa.string()),  # of data/verifier.json
        ("engine", pa.string()),  # name and version of what answered; "reference" = a person
    ]
)

#: data/tokens/part-*.parquet: one row per sample, in response order.
TOKENS = pa.schema(
    [
        ("sample_id", pa.string()),  # the prompt_id, with -1, -2 ... behind it for further answers to the prompt
        ("sample_digest", pa.string()),  # sha256 of input_ids and loss_mask
        ("source", pa.string()),
        ("category", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),  # prompt ids then output ids
        ("loss_mask", pa.list_(pa.bool_())),  # true where the verifier (or the reference) wrote the token
        ("prompt_length", pa.int32()),  # [0, prompt_length) is the prompt
        ("thinking_start", pa.int32()),  # [thinking_start, thinking_end) is thinking, markers included; equal = none
        ("thinking_end", pa.int32()),  # where it ends
        ("thinking_opened_by", pa.string()),  # prompt | model; null = there is no thinking
        ("thinking_ended_by", pa.string()),  # marker | tool_call | end_of_turn | budget; null = there is no thinking
        ("stray_markers", pa.int32()),  # think markers in the output that neither opened nor closed the thinking
        ("answer_start", pa.int32()),  # [answer_start, length) is the answer, stop token included
        ("length", pa.int32()),  # of input_ids
        ("truncated_in", pa.string()),  # thinking | answer where the token budget ended the row, else null
        ("greedy", pa.bool_()),  # every generated token was the verifier's first choice
        ("rebuilt", pa.bool_()),  # true if the ids come from text, not from the engine
    ]
)

#: data/tokens/audit.parquet: one row per sample that has ids and was also rebuilt from its text.
AUDIT = pa.schema(
    [
        ("sample_id", pa.string()),
        ("category", pa.string()),
        ("kind", pa.string()),  # what went wrong, one of audit.KINDS; null = the same ids
        ("place", pa.int32()),  # of the first difference in prompt + output; null = the same ids, or none were made
        ("length", pa.int32()),  # of the ids that are known
        ("rebuilt_length", pa.int32()),  # null = the text gave no ids at all
        ("written", pa.string()),  # what the verifier wrote from there on, a few tokens
        ("rebuilt", pa.string()),  # what the text gave instead
        ("has_thinking", pa.bool_()),  # the ids hold thinking with text in it
        ("naive_identical", pa.bool_()),  # the chat template, applied to the finished conversation, gives the same ids
        ("naive_thinking_lost", pa.bool_()),  # it leaves out the thinking
    ]
)


def sample_name(prompt_id: str, sample: int) -> str:
    """Id of one answer to a prompt: the prompt's own for the first, numbered for further ones."""
    return f"{prompt_id}-{sample}" if sample else prompt_id


#: index.parquet of responses/ and tokens/: one row per part, in order.
PARTS = pa.schema(
    [
        ("file", pa.string()),  # name inside the folder
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),  # of the whole file
    ]
)

#: rejected.parquet beside every table: the rows that did not pass, each with its reason.
REJECTED = pa.schema(
    [
        ("row", pa.string()),  # which one: a place in a source, an id
        ("reason", pa.string()),  # one of a few; counted by reason in the metrics
        ("detail", pa.string()),  # what exactly
    ]
)

#: data/hidden_states/index.parquet: one row per sample, in shard order.
STATES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("sample_digest", pa.string()),  # sha256 of input_ids and loss_mask
        ("category", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),  # file name inside data/hidden_states
        ("position", pa.int32()),  # ordinal of the sample in its shard
        ("row_start", pa.int64()),  # its tokens are rows [row_start, row_start + length) of the shard's tensors
        ("length", pa.int32()),  # how many
        ("loss_tokens", pa.int32()),  # how many of them were generated
        ("shard_bytes", pa.int64()),  # size of the whole file
        ("shard_sha256", pa.string()),  # of the whole file
    ]
)

#: data/evaluation/steps.parquet: one row per verifier forward that judged a draft, from the engine's own steps.
STEPS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("num_speculative_tokens", pa.int32()),  # most that the draft proposes; the setting, with batch_size
        ("batch_size", pa.int32()),  # prompts decoded at a time
        ("position", pa.int32()),  # output tokens that stood before this step
        ("drafted", pa.list_(pa.int32())),  # what the draft proposed, in verifier ids
        ("accepted", pa.int32()),  # how many of them the verifier accepted
        ("emitted", pa.int32()),  # tokens that came out of the step: accepted + 1, or fewer where the answer ended
    ]
)

#: data/evaluation/answers.parquet: one row per evaluated prompt, setting and arm.
ANSWERS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("source", pa.string()),
        ("num_speculative_tokens", pa.int32()),  # of the setting, in the plain arm too
        ("batch_size", pa.int32()),
        ("arm", pa.string()),  # plain | draft
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("output_token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),  # stop | length
        ("seconds", pa.float64()),  # of the batch that the prompt was decoded in
        ("batch", pa.int32()),  # prompts of one batch share its number and its seconds
    ]
)

#: data/evaluation/forwards.parquet: one row per step of an engine.
FORWARDS = pa.schema(
    [
        ("num_speculative_tokens", pa.int32()),  # of the setting
        ("batch_size", pa.int32()),  # of the setting
        ("arm", pa.string()),  # plain | draft
        ("seconds", pa.float64()),  # that it took
        ("requests", pa.int32()),  # how many it computed
        ("tokens", pa.int32()),  # of all of them: a prompt's, or one and the drafted ones of each request
    ]
)

#: data/evaluation/breakdown.parquet: acceptance of the first setting, by what a step or a judged token belongs to.
BREAKDOWN = pa.schema(
    [
        ("counts", pa.string()),  # step: value is the acceptance length | token: value is the acceptance rate
        ("dimension", pa.string()),  # such as category or token class
        ("group", pa.string()),  # one of the dimension's values
        ("value", pa.float64()),  # the ratio of the sums
        ("low", pa.float64()),  # ends of the confidence interval by bootstrap over prompts; null = too few prompts
        ("high", pa.float64()),  # likewise
        ("counted", pa.int64()),  # steps or judged tokens
        ("prompts", pa.int64()),  # how many prompts they are of
    ]
)

#: Tensors of one hidden-state shard (safetensors), by name: what each holds.
SHARD_TENSORS = {
    "input_ids": "int32 [T], the samples one behind the other, as the engine read them",
    "loss_mask": "bool [T], true where the verifier generated the token",
    "offsets": "int64 [N + 1], sample j is rows offsets[j] to offsets[j + 1]",
    "aux_hidden_states": "[T, A * H], the residual stream entering each auxiliary layer, ascending",
    "last_hidden_states": "[T, H], the residual stream after the last layer, before the final norm",
}

#: Further tensors of a shard whose states are fp8 (metadata dtype float8_e4m3fn): state = value * scale.
SHARD_SCALES = {
    "aux_scales": "float32 [T, A], powers of two",
    "last_scales": "float32 [T, 1], powers of two",
}

#: Keys of a shard's metadata, all text.
SHARD_METADATA = (
    "schema_version",  # SCHEMA_VERSION of the code that wrote it
    "key",  # content key of the shard; its file is named after it
    "verifier_digest",  # of data/verifier.json
    "aux_layer_ids",  # JSON list
    "hidden_size",  # H
    "dtype",  # of the states as they are stored
    "prenorm",  # "true": last_hidden_states is before the final norm
    "engine",  # name and version of the vLLM package
)
