"""Chat templates of the nature of public models', written anew and small, and beside each what it writes, in Python.

What a template writes of user and assistant messages is said a second time by ``write``: the documents of a conversation as
texts and whether each is learned. It knows nothing of templates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Segments = list[tuple[str, bool]]


class Nature(NamedTuple):
    """A chat template.

    Attributes:
        source: Its text.
        write: Return the documents of a conversation.
        eos: The ``eos_token``.
        says: What a note of the build says; empty: there is none.
        bos: The ``bos_token``.
        stops: Further tokens of ``generation_config.json``.
        system: It takes a system message.
    """

    source: str
    write: Callable[[Messages], list[Segments]]
    eos: str
    says: str = ""
    bos: str = "<s>"
    stops: tuple[str, ...] = ()
    system: bool = True


def turns(
    heads: dict[str, str], answer_end: str, other_end: str, begin: str = "", trim: bool = False
) -> Callable[[Messages], list[Segments]]:
    """Return what writes each message after the other: a head, the content and an end."""

    def write(messages: Messages) -> list[Segments]:
        document: Segments = [(begin, False)]
        for m in messages:
            text, answer = m["content"].strip() if trim else m["content"], m["role"] == "assistant"
            document += [
                (heads[m["role"]], False),
                (text + (answer_end if answer else other_end), answer),
            ]
        return [document]

    return write


def roles(form: str, **names: str) -> dict[str, str]:
    return {role: form.format(names.get(role, role)) for role in ("system", "user", "assistant")}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS_MARKS = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
CHATML_HEADS = roles("<|im_start|>{}\n")


def marked(messages: Messages) -> list[Segments]:
    document: Segments = []
    for m in messages:
        answer = m["role"] == "assistant"
        document += [
            (CHATML_HEADS[m["role"]], False),
            (m["content"] + "<|im_end|>", answer),
            ("\n", False),
        ]
    return [document]


def endless_marks(messages: Messages) -> list[Segments]:
    document: Segments = []
    for m in messages:
        answer = m["role"] == "assistant"
        document += [
            (CHATML_HEADS[m["role"]], False),
            (m["content"], answer),
            ("<|im_end|>\n", False),
        ]
    return [document]


# Reasoning is written after the last question only, and there even where there is none.
THINKING = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- text }}
        {%- for c in m.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
            {{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def thinking(messages: Messages) -> list[Segments]:
    """Answers to one question are in one document, and earlier ones are without reasoning."""
    questions = [i for i, m in enumerate(messages) if m["role"] == "user"]
    documents: list[Segments] = []
    for begin, end in zip([-1, *questions], [*questions, len(messages)], strict=True):
        if not any(m["role"] == "assistant" for m in messages[begin + 1 : end]):
            continue
        last = max(i for i in range(end) if messages[i]["role"] == "assistant")
        # Messages behind the last answer are read where no question follows them.
        stop = end if end == len(messages) else last + 1
        document: Segments = []
        for i, m in enumerate(messages[:stop]):
            document.append((CHATML_HEADS[m["role"]], False))
            if m["role"] == "assistant":
                before, _, text = m["content"].rpartition("</think>")
                thought = before.split("<think>")[-1].strip("\n")
                text = text.lstrip("\n") if before else text
                if i > begin:
                    document.append((f"<think>\n{thought}\n</think>\n\n{text}<|im_end|>\n", True))
                else:
                    document.append((text + "<|im_end|>\n", False))
            else:
                document.append((m["content"] + "<|im_end|>\n", False))
        documents.insert(0, document)
    return documents


LLAMA2 = """\
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set said = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{%- else %}{% set rest = messages %}{% set said = '' %}{% endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if m.role == 'user' %}{{ bos_token + '[INST] ' + (said if loop.first else '') + m.content | trim + ' [/INST]' }}
    {%- else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""


def llama2(messages: Messages) -> list[Segments]:
    document: Segments = []
    system = ""
    for m in messages:
        text = m["content"].strip()
        if m["role"] == "system":
            system = f"<<SYS>>\n{m['content']}\n<</SYS>>\n\n"
        elif m["role"] == "user":
            # Jinja's filter binds to the content alone.
            document.append((f"<s>[INST] {system}{text} [/INST]", False))
            system = ""
        else:
            document.append((f" {text} </s>", True))
    return [document]


LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# The system message is written with the last question.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set said = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set said = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in rest %}
    {%- if m.role == 'user' %}{{ '[INST] ' + (said if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
    {%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}"""


def mistral(messages: Messages) -> list[Segments]:
    system, rest = "", messages
    if messages[0]["role"] == "system":
        system, rest = messages[0]["content"] + "\n\n", messages[1:]
    questions = [i for i, m in enumerate(rest) if m["role"] == "user"]
    ends = [len(rest)] if not system else [*questions[1:], len(rest)]
    documents: list[Segments] = []
    for n, end in enumerate(ends):
        last = questions[n] if system else -1
        document: Segments = [("<s>", False)]
        for i, m in enumerate(rest[:end]):
            if m["role"] == "user":
                said = system if i == last else ""
                document.append((f"[INST] {said}{m['content']}[/INST]", False))
            else:
                document.append((f" {m['content']}</s>", i > last))
        documents.insert(0, document)
    return documents


GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Reasoning is never written, and the model is let begin with it.
R1 = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
    {%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

# What ends everything follows the last answer only.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def phi3(messages: Messages) -> list[Segments]:
    (document,) = turns(roles("<|{}|>\n"), "<|end|>\n", "<|end|>\n")(messages)
    return [[*document, ("<|endoftext|>", messages[-1]["role"] == "assistant")]]


# An answer is ended by the token of the next role.
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def glm4(messages: Messages) -> list[Segments]:
    document: Segments = [("[gMASK]<sop>", False)]
    for i, m in enumerate(messages):
        after_answer = i > 0 and messages[i - 1]["role"] == "assistant"
        document += [
            (f"<|{m['role']}|>", after_answer),
            ("\n" + m["content"], m["role"] == "assistant"),
        ]
    if messages[-1]["role"] == "assistant":
        document.append(("<|endoftext|>", True))
    return [document]


TELECHAT = """\
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ '<_system>' + m.content + '\\n' }}
    {%- elif m.role == 'user' %}{{ '<_user>' + m.content }}
    {%- elif m.role == 'assistant' %}{{ '<_bot>' + m.content + '<_end>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<_bot>' }}{% endif %}"""


def telechat(messages: Messages) -> list[Segments]:
    document: Segments = []
    for m in messages:
        head = {"system": "<_system>", "user": "<_user>", "assistant": "<_bot>"}[m["role"]]
        end = {"system": "\n", "user": "", "assistant": "<_end>\n"}[m["role"]]
        document += [(head, False), (m["content"] + end, m["role"] == "assistant")]
    return [document]


ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
COMMAND = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'}[m.role] }}"
    "{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:{% endif %}"
)


def plain(messages: Messages) -> list[Segments]:
    document: Segments = []
    for m in messages:
        document += [(f"### {m['role']}:", False), (f" {m['content']}\n", m["role"] == "assistant")]
    if messages[-1]["role"] == "assistant":
        document.append(("<|endoftext|>", True))
    return [document]


NATURES = {
    "chatml": Nature(CHATML, turns(CHATML_HEADS, "<|im_end|>\n", "<|im_end|>\n"), "<|im_end|>"),
    "promptless": Nature(
        CHATML.partition("{% if add")[0],
        turns(CHATML_HEADS, "<|im_end|>\n", "<|im_end|>\n"),
        "<|im_end|>",
    ),
    "base": Nature(
        CHATML,
        turns(CHATML_HEADS, "<|im_end|>\n", "<|im_end|>\n"),
        "<|endoftext|>",
        "end with <|im_end|>, where generation does not stop",
    ),
    "marked": Nature(MARKED, marked, "<|im_end|>"),
    "endless marks": Nature(
        ENDLESS_MARKS, endless_marks, "<|im_end|>", "have no token that ends them"
    ),
    "qwen3": Nature(THINKING, thinking, "<|im_end|>"),
    "llama2": Nature(LLAMA2, llama2, "</s>"),
    "llama3": Nature(
        LLAMA3,
        turns(
            roles("<|start_header_id|>{}<|end_header_id|>\n\n"),
            "<|eot_id|>",
            "<|eot_id|>",
            "<s>",
            True,
        ),
        "<|eot_id|>",
    ),
    "mistral": Nature(MISTRAL, mistral, "</s>"),
    "gemma": Nature(
        GEMMA,
        turns(
            roles("<start_of_turn>{}\n", assistant="model"),
            "<end_of_turn>\n",
            "<end_of_turn>\n",
            "<s>",
            True,
        ),
        "</s>",
        stops=("</s>", "<end_of_turn>"),
        system=False,
    ),
    "deepseek": Nature(
        R1,
        turns({"system": "", "user": "<|User|>", "assistant": "<|Assistant|>"}, "</s>", "", "<s>"),
        "</s>",
        "do not begin with '<think>\\n'",
    ),
    "phi3": Nature(PHI3, phi3, "<|endoftext|>", stops=("<|end|>", "<|endoftext|>")),
    "glm4": Nature(
        GLM4,
        glm4,
        "<|endoftext|>",
        "got <|endoftext|> at their end",
        stops=("<|endoftext|>", "<|user|>"),
    ),
    "telechat": Nature(TELECHAT, telechat, "<_end>"),
    "zephyr": Nature(ZEPHYR, turns(roles("<|{}|>\n"), "</s>\n", "</s>\n"), "</s>"),
    "command": Nature(
        COMMAND,
        turns(
            roles(
                "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>",
                system="SYSTEM",
                user="USER",
                assistant="CHATBOT",
            ),
            "<|END_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<s>",
            True,
        ),
        "<|END_OF_TURN_TOKEN|>",
    ),
    "plain": Nature(PLAIN, plain, "<|endoftext|>", "got <|endoftext|> at their end"),
}
TOKENS = (
    *("<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *(
        "<|User|>",
        "<|Assistant|>",
        "<|user|>",
        "<|system|>",
        "<|assistant|>",
        "<|end|>",
        "[gMASK]",
        "<sop>",
    ),
    *(
        "<_system>",
        "<_user>",
        "<_bot>",
        "<_end>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
)
"""Special tokens of all of them."""
