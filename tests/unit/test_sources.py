"""Where tokens come from."""


def test_text_files_are_documents_each_closed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "sub" / "a.txt").write_text("aa")
    (tmp_path / "empty.txt").write_text("")
    tokens = load_tokens(Data(source="text", path=str(tmp_path)), BYTES)
    assert tokens.tolist() == [ord("B"), 256, ord("a"), ord("a"), 256]
    assert tokens.dtype == np.uint16
    assert load_tokens(Data(source="text", path=str(tmp_path / "*.txt")), BYTES).tolist() == [ord("B"), 256]


def test_bad_text_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"bad\.txt: byte 3 is not UTF-8"):
        load_tokens(Data(source="text", path=str(tmp_path)), BYTES)
    (tmp_path / "bad.txt").write_bytes(b"")
    with pytest.raises(UserError, match="every file that it names is empty"):
        load_tokens(Data(source="text", path=str(tmp_path)), BYTES)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "d [v1]").mkdir()
    (tmp_path / "d [v1]" / "a.txt").write_text("a")
    assert load_tokens(Data(source="text", path=str(tmp_path / "d [v1]")), BYTES).tolist() == [ord("a"), 256]
    (tmp_path / "d [v1]" / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone\.txt: cannot be read: No such file"):
        load_tokens(Data(source="text", path=str(tmp_path / "d [v1]")), BYTES)


def test_the_standard_library_is_there_and_synthetic_tokens_repeat() -> None:
    tokens = load_tokens(Data(), BYTES)
    assert len(tokens) > 3_000_000
    assert b"class JSONEncoder" in bytes(tokens[tokens < 256].astype(np.uint8))
    one, other = (load_tokens(Data(source="synthetic"), BYTES) for _ in range(2))
    assert fingerprint(one) == fingerprint(other) != fingerprint(tokens)
    assert one.max() == 256
