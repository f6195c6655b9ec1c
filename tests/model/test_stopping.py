"""Where texts end: stop strings across tokens, characters in pieces, what may be shown and what must wait."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pe_lab.data.tokenizers import ByteTokenizer
from pe_lab.model.generation import Ending, first_stop

BYTES = ByteTokenizer()


def run(data: bytes, stop=(), eos=(256,), prompt=b"So: "):
    """All bytes one by one: (the pieces, the ending)."""
    ending = Ending(list(prompt), eos, stop, BYTES.decode)
    pieces = [ending.push(token) for token in data]
    return [*pieces, ending.finish()], ending


def pieces_of(words, stop):
    """Words as tokens."""
    ending = Ending([0], (), stop, lambda ids: "".join((["", *words])[i] for i in ids))
    pieces = [ending.push(i + 1) for i in range(len(words))]
    return [*pieces, ending.finish()], ending


def test_a_stop_string_across_tokens_is_cut_and_never_shown():
    pieces, ending = pieces_of(["The ", "end", " of", " it", " all"], (" of it",))
    assert "".join(pieces) == ending.text == "The end" and ending.done
    assert pieces == ["The", " end", "", "", "", ""]
    assert ending.ids == [1, 2]
    # What only began like one is shown as soon as that is clear.
    pieces, ending = pieces_of(["The ", "end", " of", " that", " of"], (" of it",))
    assert pieces == ["The", " end", "", " of that", "", " of"] and ending.ids == [1, 2, 3, 4, 5]
    # Within one token, and with text behind it.
    pieces, ending = pieces_of(["a", "bSTOPc", "d"], ("STOP",))
    assert "".join(pieces) == ending.text == "ab" and ending.ids == [1, 2]
    pieces, ending = pieces_of(["a", "\n", "\n", "b"], ("\n\n",))
    assert pieces == ["a", "", "", "", ""] and ending.ids == [1]


def test_of_several_stop_strings_the_one_that_ends_first_counts():
    assert first_stop("abcde", ("abcde", "cd")) == (4, 2)
    assert first_stop("abcd", ("cd", "bcd")) == (4, 1)
    assert first_stop("xyz", ("a",)) == (0, 0)
    pieces, _ = pieces_of(["a", "bc", "d", "e"], ("abcde", "cd"))
    assert "".join(pieces) == "ab"
    assert "".join(pieces_of(["abcde"], ("abcde", "cd"))[0]) == "ab"


def test_the_prompt_does_not_stop_its_continuation():
    pieces, ending = run(b"ST", ("STOP", "P: S"), prompt=b"OP: ")
    assert "".join(pieces) == "ST"


def test_an_end_of_text_is_not_part_of_it():
    ending = Ending([1], (256, 7), ("ab",), BYTES.decode)
    assert ending.push(97) == "" and ending.push(7) == "a" and ending.done
    assert ending.ids == [97] and ending.push(98) == "" and ending.finish() == "" and ending.text == "a"


def test_characters_come_whole():
    pieces, ending = run("né €😀!".encode())
    assert [p for p in pieces if p] == ["n", "é", " ", "€", "😀", "!"] and ending.text == "né €😀!"
    pieces, _ = run("a€".encode()[:-1])  # an incomplete character is written at the end
    assert pieces[:-1] == ["a", "", ""] and pieces[-1] == "\ufffd"


def test_without_text_there_are_only_ids():
    ending = Ending([1, 2], (5,))
    assert [ending.push(i) for i in (3, 4, 5, 6)] == [""] * 4
    assert ending.ids == [3, 4] and ending.result().tolist() == [3, 4] and ending.done


def test_the_space_before_a_first_word_is_kept():
    """Tokenizers such as Llama's drop the space that begins a text; a continuation does not begin one."""
    words = ["", "▁The", "▁needle", "▁is", "▁here"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")  # noqa: E731
    ending = Ending([1, 2], (), (), decode)
    assert [ending.push(3), ending.push(4)] == [" is", " here"]


@settings(max_examples=200)
@given(st.binary(max_size=40), st.lists(st.sampled_from(["ab", "a", "b\n", "é", "bab", "\n\n"]), max_size=3))
def test_pieces_are_the_text_however_bytes_fall(data, stop):
    pieces, ending = run(data, stop)
    assert "".join(pieces) == ending.text and ending.done
    whole = data.decode("utf-8", errors="replace")
    end, begin = first_stop(whole, stop)
    assert ending.text == (whole[:begin] if end else whole)


@settings(max_examples=200)
@given(
    st.text("ab\n", max_size=12),
    st.lists(st.integers(1, 3), min_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_how_a_text_is_cut_into_tokens_does_not_matter(text, sizes, stop):
    words, at = [], 0
    for size in sizes:
        words.append(text[at : at + size])
        at += size
    pieces, ending = pieces_of(words, stop)
    end, begin = first_stop_by_character(text, stop)
    assert "".join(pieces) == ending.text == (text[:begin] if end else text)


def first_stop_by_character(text, stop):
    for end in range(1, len(text) + 1):
        begins = [end - len(one) for one in stop if text[:end].endswith(one)]
        if begins:
            return end, min(begins)
    return 0, 0
