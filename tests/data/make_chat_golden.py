"""Makes chat_golden.json beside it: chats as transformers encodes them, with its masks of the assistant's tokens.

Run it with a Python that has transformers 5, tokenizers and jinja2 (torch is not needed); it prints their versions:

    python tests/data/make_chat_golden.py

The tokenizer is tiny and trained here. Every template marks the assistant's answers with {% generation %}.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers
import transformers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|eot|>"]
TRAINING = ["user assistant system What is the answer? It is naïve: 日本語, 12, 1234.\n\nHello, hello, the end."] * 20
TEMPLATES = {
    "chatml": """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "trimmed": """{%- if messages[0].role != 'system' -%}
{{- bos_token + 'system: be brief' + '<|eot|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {{- 'assistant: ' -}}
        {%- generation -%}
            {{- message['content'] | trim + '<|eot|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message['role'] + ': ' + message['content'] | trim + '<|eot|>' -}}
    {%- endif -%}
{%- endfor -%}""",
    "inside": """{{ bos_token }}{% for message in messages %}
{{ message.role }}:{% if message.role != 'assistant' %} {{ message.content }}{% continue %}{% endif %}
{% generation %} {{ message.content }}{% endgeneration %}{% endfor %}""",
}
CHATS = [
    [
        {"role": "system", "content": "Be naïve."},
        {"role": "user", "content": "What is the answer?"},
        {"role": "assistant", "content": "日本語 🙂 12"},
        {"role": "user", "content": " and the <|im_end|> of hello?  "},
        {"role": "assistant", "content": "  the end.\n\nassistant: 1234 "},
    ],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "hello"}],
]


def main() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    cases = []
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(str(Path(directory, "tokenizer.json")))
        for name, template in TEMPLATES.items():
            configuration = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "bos_token": "<|begin|>",
                "chat_template": template,
            }
            Path(directory, "tokenizer_config.json").write_text(json.dumps(configuration))
            read = transformers.AutoTokenizer.from_pretrained(directory)
            for messages in CHATS:
                found = read.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                case = {"template": name, "messages": messages, "ids": found["input_ids"]}
                cases.append({**case, "loss": found["assistant_masks"]})
    by = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    golden = {"by": by, "tokenizer": json.loads(tokenizer.to_str()), "templates": TEMPLATES, "cases": cases}
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n"
    Path(__file__).with_name("chat_golden.json").write_text(text, encoding="utf-8")
    print(by, f"{len(cases)} chats")


if __name__ == "__main__":
    main()
