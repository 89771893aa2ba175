"""Reading a model directory: tokenizer, special tokens, chat template."""

import json
import subprocess
import sys

import pytest
import tokenizers

from contract.errors import InvalidArgumentError
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def write(directory, bpe, config, **files):
    bpe.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return load_tokenizer(directory)


def test_encode_adds_special_tokens_by_default(model_dir):
    tokenizer = load_tokenizer(model_dir)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.decode([0, *plain, 1]) == "hello"
    assert tokenizer.decode([0, *plain], skip_special_tokens=False) == "<s>hello"


@pytest.fixture
def word_pieces(tmp_path):
    """The tokenizer of a BERT, and Quire's reader of it."""
    words = ["[UNK]", "[CLS]", "[SEP]", *"abc", *("##a", "##b"), ".", "'", "s", "a#"]
    vocab = {word: i for i, word in enumerate(words)}
    given = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    given.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    given.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    given.decoder = tokenizers.decoders.WordPiece()
    return given, write(tmp_path, given, {})


def test_word_pieces_decode_as_the_package_decodes_them(word_pieces):
    given, tokenizer = word_pieces
    for text in ("ab a. b", "a's c", "b", "c aba.", "a ' b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == given.decode(ids)


def test_a_pair_says_where_its_second_text_begins(word_pieces):
    given, tokenizer = word_pieces
    pair = given.encode("a b", "c c c")
    ids, num_first = tokenizer.encode_whole("a b", "c c c", None, add_special_tokens=True)
    assert (ids, num_first) == (pair.ids, pair.type_ids.index(1)) == (pair.ids, 4)
    assert tokenizer.encode_whole("a b", None, None, add_special_tokens=True) == ([1, 3, 4, 2], 0)


def test_a_cut_keeps_special_tokens_and_the_first_text(word_pieces):
    _, tokenizer = word_pieces
    cut = tokenizer.encode_whole("a b", "c c c", 6, add_special_tokens=True)
    assert cut == ([1, 3, 4, 2, 5, 2], 4)
    assert tokenizer.encode_whole("a b c", None, 4, add_special_tokens=True) == ([1, 3, 4, 2], 0)
    assert tokenizer.encode_whole("a b c", None, 2, add_special_tokens=False) == ([3, 4], 0)
    with pytest.raises(InvalidArgumentError, match="truncate_prompt_tokens is 5; 1 more"):
        tokenizer.encode_whole("a b", "c c c", 5, add_special_tokens=True)


def test_truncation_and_padding_left_over_from_training_are_off(tmp_path, bpe):
    copy = type(bpe).from_str(bpe.to_str())
    copy.enable_truncation(2)
    copy.enable_padding(length=50)
    text = "the quick brown fox"
    assert write(tmp_path, copy, {}).encode(text) == bpe.encode(text).ids


def test_a_token_that_the_config_calls_special_is_skipped(tmp_path, bpe):
    call = bpe.token_to_id("<tool call>")
    assert write(tmp_path, bpe, {}).decode([call]) == "<tool call>"
    config = {"eos_token": {"content": "<tool call>", "special": True}}
    assert write(tmp_path, bpe, config).decode([call]) == ""


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "A{{ messages[0].content }}"}, {}),
        ({"chat_template": [{"name": "rag", "template": "no"},
                            {"name": "default", "template": "A{{ messages[0].content }}"}]}, {}),
        ({"chat_template": "no"}, {"chat_template__jinja": "A{{ messages[0].content }}"}),
    ],
    ids=["string", "list", "file wins"],
)  # fmt: skip
def test_the_chat_template_is_found(tmp_path, bpe, config, files):
    template = write(tmp_path, bpe, config, **files).chat_template
    assert template.render(MESSAGES) == "Ahi"


def test_a_model_without_a_chat_template_has_none(tmp_path, bpe):
    assert write(tmp_path, bpe, {}).chat_template is None


def test_special_tokens_come_from_either_file_in_either_form(tmp_path, bpe):
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ eos_token }}"}
    tokenizer = write(
        tmp_path, bpe, config, special_tokens_map__json=json.dumps({"eos_token": "</s>"})
    )
    assert tokenizer.chat_template.render(MESSAGES) == "<s></s>"


def test_templates_have_the_environment_that_they_are_written_for():
    template = ChatTemplate(
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}\n"
        "{% endfor %}\n"
        "{% generation %}G{% endgeneration %}{{ strftime_now('%Y')|length }}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ thinking }}",
        {},
    )
    messages = [{"role": "skip"}, {"role": "é <b>"}]
    assert template.render(messages, thinking=1) == '{"role": "é <b>"}\nG4TrueTrue1'


def test_a_templates_refusal_is_invalid_argument_in_its_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidArgumentError, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",  # changes its input
        "{{ ''.__class__.__mro__ }}",  # leaves the sandbox
        "{{ messages[0].content + 1 }}",  # content of another type than it expects
    ],
)
def test_a_template_that_goes_astray_is_an_error_and_not_a_way_out(source):
    with pytest.raises(InvalidArgumentError):
        ChatTemplate(source + "{{ nothing.at.all }}", {}).render(MESSAGES)


def test_text_and_chats_become_the_tokens_that_transformers_makes(model_dir):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model_dir)
    ours = load_tokenizer(model_dir)
    text = "naïve café 🙂\n\tdef main()"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], True)
    chat = [*MESSAGES, {"role": "assistant", "content": "ho"}, *MESSAGES]
    rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.chat_template.render(chat) == rendered


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_importing_the_router_imports_no_torch():
    code = "import router.app, sys; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
