"""Label counts as people have them, and for every form its bad twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.tables import read_available, read_counts, read_target

GOOD = {
    "semicolons": (b"client;a;b\nx;1;2\ny;3;4\n", "separated by semicolon"),
    "tabs": (b"client\ta\tb\nx\t1\t2\ny\t3\t4\n", "separated by tab"),
    "named by Excel": (b"sep=;\r\nclient;a;b\r\nx;1;2\r\ny;3;4\r\n", "separated by semicolon"),
    "UTF-16": ("client,a,b\nx,1,2\ny,3,4\n".encode("utf-16"), "read as UTF-16"),
    "UTF-16, the other end first": (b"\xfe\xff" + "client,a,b\nx,1,2\ny,3,4\n".encode("utf-16-be"), "read as UTF-16"),
    "UTF-16 without a mark": (
        "client\ta\tb\nx\t1\t2\ny\t3\t4\n".encode("utf-16-le"),
        "read as UTF-16, separated by tab",
    ),
    "UTF-32": ("client,a,b\nx,1,2\ny,3,4\n".encode("utf-32"), "read as UTF-32"),
    "byte-order mark and semicolons": (
        b"\xef\xbb\xbfclient;a;b\nx;1;2\ny;3;4\n",
        "read as UTF-8, separated by semicolon",
    ),
    "another first column": (b"hospital,a,b\nx,1,2\ny,3,4\n", "clients are those of the column 'hospital'"),
    "no name for it": (b",a,b\nx,1,2\ny,3,4\n", "clients are those of the column ''"),
    "decimal comma": (b"client;a;b\nx;1,0;2\ny;3;4,00\n", "separated by semicolon"),
    "decimal comma proved elsewhere": (b"client\ta\tb\nx\t0,001e3\t2\ny\t3\t4\n", "separated by tab"),
    "long": (b"client,class,count\nx,a,1\nx,b,2\ny,b,4\ny,a,3\n", "long format, 2 clients with 2 classes"),
    "long, other names and order": (b"label;n;site\na;1;x\nb;2;x\nb;4;y\na;3;y\n", "long format"),
    "long, classes first, known by its text": (b"label,who,how many\na,x,1\nb,x,2\nb,y,4\na,y,3\n", "long format"),
    "long, known by its text": (b"who,what,how many\nx,a,1\nx,b,2\ny,b,4\ny,a,3\n", "long format"),
    "a trailing separator": (b"client;a;b;\nx;1;2;\ny;3;4\n", "separated by semicolon"),
    "a client without samples": (b"client,a,b\nx,1,2\nempty,0,0\ny,3,4\n", "left out, no samples: 'empty'"),
    "a client without samples, long": (b"client,class,count\nx,a,1\nx,b,2\nz,b,0\ny,b,4\ny,a,3\n", "no samples: 'z'"),
    "row numbers by pandas": (b",client,a,b\n0,x,1,2\n1,y,3,4\n", "left out, row numbers: the first column"),
    "row numbers of a long table": (b",client,class,count\n1,x,a,1\n2,x,b,2\n3,y,b,4\n4,y,a,3\n", "row numbers"),
    "blank lines": (b"\r\n\r\nclient;a;b\r\n\r\nx;1;2\r\n;;\r\ny;3;4\r\n", "separated by semicolon"),
}


@pytest.mark.parametrize("form", GOOD)
def test_forms(tmp_path: Path, form: str) -> None:
    content, said = GOOD[form]
    path = tmp_path / "counts.csv"
    path.write_bytes(content)
    file = read_counts(path)
    assert file.clients == ("x", "y")
    assert file.classes == ("a", "b")
    assert file.counts.tolist() == [[1, 2], [3, 4]]
    assert said in "\n".join(file.notes)


def test_numbers_beside_row_numbers_are_ids_only_if_all_differ(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text(",client,a,b\n0,7,1,2\n1,3,3,4\n")
    file = read_counts(path)
    assert (file.clients, file.classes, file.heading) == (("7", "3"), ("a", "b"), "client")
    path.write_text(",device,a,b\n0,7,1,2\n1,7,3,4\n")
    file = read_counts(path)
    assert (file.clients, file.classes) == (("0", "1"), ("device", "a", "b"))


def test_plain_files_need_no_note(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_bytes(b"client,a,b\nx,1,2\ny,3,4\n")
    assert read_counts(path).notes == ()


def test_names_survive_their_encoding(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    for encoding in ("utf-8", "utf-16", "latin-1"):
        path.write_bytes('Krankenhaus;"Köln; Nord";ß\n"Müller, 1";1;2\n'.encode(encoding))
        file = read_counts(path)
        assert (file.clients, file.classes) == (("Müller, 1",), ("Köln; Nord", "ß")), encoding
    path.write_bytes(b"client,a\nEuro \x80,1\n")  # Windows-1252 has more than Latin-1
    assert read_counts(path).clients == ("Euro €",)


def test_class_numbers_are_a_header(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("site,0,1,2\nBonn,5,0,1\nKöln,0,7,3\n", encoding="utf-8")
    assert read_counts(path).classes == ("0", "1", "2")
    path.write_text("client,class,count\nu,10,1\nu,9,2\n")
    assert read_counts(path).classes == ("9", "10")  # class numbers in their order
    path.write_text("client,only\nx,3\n")
    assert read_counts(path).counts.tolist() == [[3]]


BAD = {
    "which separators": (
        b"client|a|b\nx|1|2\n",
        "line 1: there is no class column in 'client|a|b' (tried as separators: comma, semicolon and tab)",
    ),
    "open quote": (
        b'client;a;b\n"x;1;2\n',
        "line 2: unexpected end of data (tried as separators: comma, semicolon and tab; read with semicolon)",
    ),
    "ragged with tabs": (b"client\ta\tb\nx\t1\n", "line 2, column 'b': the cell is missing"),
    "half of UTF-16": (b"\xff\xfec\x00l", "begins as UTF-16 text and is none"),
    "UTF-8 with a wrong byte": (
        "client,a\nKöln,1\n".encode() + b"K\xf6ln,1\n",
        "line 3: the byte 0xf6 is not UTF-8 text, as other letters are",
    ),
    "control character": (b"client,a\nx\x00,1\n", "line 2: the character '\\x00' is not text"),
    "blanks around a client": (b"client,a,b\nx,1,2\nx ,3,4\n", "line 3: client 'x ' differs from 'x' in blanks alone"),
    "blanks around a client, long": (
        b"client,class,count\nx,a,1\ny,a,3\n x,b,2\n",
        "line 4: client ' x' differs from 'x' in blanks alone; accepted: one spelling",
    ),
    "JSON": (
        b'[\n {"client": "x", "a": 1, "b": 2},\n {"client": "y", "a": 3, "b": 4}\n]\n',
        "looks like JSON; accepted: a CSV",
    ),
    "JSON on one line": (b'{"x": {"a": 1, "b": 2}}', "looks like JSON; accepted: a CSV file, .xlsx or .parquet"),
    "Excel under another name": (b"PK\x03\x04rest", "holds no text; accepted: a CSV file, or .xlsx"),
    "no header": (b"site-1,5,0,3\nsite-2,1,2,9\n", "line 1: 'site-1,5,0,3' is a row of counts, not a header"),
    "no header, class numbers by chance": (b"site-1,1,2\nsite-2,4,9\n", "line 1: 'site-1,1,2' is a row of counts"),
    "no header, ids are numbers": (b"0,1,2\n1,4,9\n", "line 1: '0,1,2' is a row of counts"),
    "total": (
        b"client,a,b,total\nx,1,2,3\ny,3,4,7\n",
        "column 'total': equals the sum of the other classes for every client; accepted: --drop total",
    ),
    "total without a telling name": (
        b"client,a,b,Alle zusammen\nx,1,2,3\ny,3,4,7\nz,0,5,5\n",
        "accepted: --drop 'Alle zusammen', or --drop none",
    ),
    "total of a long table": (
        b"client,class,count\nx,a,1\nx,b,2\nx,total,3\ny,a,5\ny,total,5\n",
        "column 'total': equals the sum",
    ),
    "total that does not add up": (
        b"client,a,b,Total\nx,1,2,3\ny,3,4,9\n",
        "column 'Total': is called a total, and is not the sum of the other classes for every client; accepted: --drop",
    ),
    "total of more clients than there are": (
        b"client,a,b\nx,1,2\ny,3,4\nSumme,40,60\n",
        "line 4: 'Summe' is called a total, and is not the sum of all other rows; accepted: one row per client",
    ),
    "the header again": (
        b"client,0,1\nx,1,2\nclient,0,1\ny,3,4\n",
        "line 3: the header is there again; accepted: once, so remove it",
    ),
    "row of sums": (b"client,a,b\nx,1,2\ny,3,4\nTotal,4,6\n", "line 4: 'Total' equals the sum of all other rows"),
    "row of sums by Excel": (b"client,a,b\nx,1,2\ny,3,4\nGrand Total,4,6\n", "line 4: 'Grand Total' equals the sum"),
    "row of sums in another language": (
        b"site,a,b\nx,1,2\ny,3,4\nInsgesamt:,4,6\n",
        "line 4: 'Insgesamt:' equals the sum of all other rows; accepted: one row per client, so remove it, or --drop",
    ),
    "row of sums without a telling name": (
        b"site,a,b\nx,1,2\ny,3,0\nz,5,1\nalle drei,9,3\n",
        "line 5: 'alle drei' equals the sum of all other rows",
    ),
    "row of sums above the others": (b"site,a,b\nwhole,9,3\nx,1,2\ny,3,0\nz,5,1\n", "line 2: 'whole' equals the sum"),
    "a row per class": (
        b"label,Bonn,Kiel,Ulm\ncat,1,2,3\ndog,3,4,9\n",
        "line 1: the first column, 'label', holds classes; accepted: one row per client",
    ),
    "long, class numbers under another name": (
        b"site,icd,patients\nx,0,1\nx,1,2\n",
        "client 'x' is there twice; accepted: every client once, or the header client,class,count",
    ),
    "long, one column more": (
        b"client,class,count,the share\nx,a,1,0.3\nx,b,2,0.7\n",
        "has a column of classes, 'class', and more than client, class and count; accepted: these three, so --drop",
    ),
    "thousands in quotes": (
        b'client,a,b\nx,"1,234",2\n',
        "line 2, column 'a': '1,234' is not a number: thousands are separated in it; accepted: 1234",
    ),
    "thousands or decimals": (b"client;a;b\nx;1,234;2\n", "line 2, column 'a': '1,234' may be 1234 or 1.234"),
    "thousands by points or decimals": (b"client;a;b\nx;1.234;2\n", "'1.234' may be 1234 or 1.234"),
    "thousands by points or decimals, between commas": (
        b"client,a,b\nx,1.234,2\ny,3,4\n",
        "line 2, column 'a': '1.234' may be 1234 or 1.234, and nothing else in the file (separated by comma)",
    ),
    "thousands by points": (
        b"client;a;b\nx;1.234.567;2\n",
        "'1.234.567' is not a number: thousands are separated in it; accepted: 1234567",
    ),
    "thousands by spaces": (b"client,a,b\nx,1 234,2\n", "'1 234' is not a number: thousands are separated"),
    "thousands with decimals": (
        b"client;a;b\nx;1.234,5;2\n",
        "'1.234,5' is not a number: thousands are separated in it; accepted: 1234",
    ),
    "two decimal marks": (
        b"client;a;b\nx;1,5;2\ny;2.5;1\n",
        "line 3, column 'a': '2.5', and '1,5' in line 2; accepted: one decimal mark",
    ),
    "decimal comma between commas": (
        b'client,a,b\nx,"1,5",2\n',
        "such as 12 (a decimal comma needs a file separated by semicolon or tab)",
    ),
    "long, twice": (
        b"client,class,count\nx,a,1\nx,b,2\nx,a,3\n",
        "line 4: client 'x' with class 'a' is there twice, first in line 2",
    ),
    "long, no count": (b"client,class,count\nx,a,\n", "line 2, column 'count': the cell is empty"),
    "long, negative": (b"client,class,count\nx,a,1\nx,b,-2\n", "column 'b': the count is -2; accepted: 0 or more"),
    "long, no class": (b"client,class,count\nx, ,1\n", "line 2, column 'class': the class is empty"),
    "long, a class of their own for all of very many": (
        b"client,class,count\n" + b"".join(b"c%d,%d,1\n" % (k, 10**9 + k) for k in range(2**14 + 1)),
        "16385 clients with 16385 classes; accepted: at most 2**28 pairs",
    ),
    "long, nobody": (b"client,class,count\n", "there is no client"),
    "nobody holds anything": (b"client,a,b\nx,0,0\n", "all label counts are 0"),
    "class twice": (b"client;a;a\nx;1;2\n", "line 1, column 3: class name 'a' is there twice"),
    "client twice": (b"site\ta\nx\t1\nx\t2\n", "line 3, column 'site': client 'x' is there twice"),
    "not a number": (b"client;a\nx;NaN\n", "column 'a': the count is nan; accepted: finite"),
}


@pytest.mark.parametrize("form", BAD)
def test_bad_twins(tmp_path: Path, form: str) -> None:
    content, message = BAD[form]
    path = tmp_path / "counts.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_counts(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_columns_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,city,a,b,total\nx,Bonn,1,2,3\ny,Köln,3,4,7\n", encoding="utf-8")
    file = read_counts(path, drop=["total", "city"])
    assert (file.classes, file.counts.tolist()) == (("a", "b"), [[1, 2], [3, 4]])
    assert read_counts(path, drop=["none", "city"]).classes == ("a", "b", "total")
    for drop, message in (
        (["none"], "line 2, column 'city': 'Bonn' is not a number"),
        (["town"], "--drop: .* has no column 'town'; accepted: city, a, b, total"),
        (["client"], "--drop: 'client' is the column of clients"),
    ):
        with pytest.raises(InputError, match=message):
            read_counts(path, drop=drop)
    path.write_text("client,class,count\nx,a,1\nx,b,2\nx,total,3\ny,a,5\ny,total,5\n")
    assert read_counts(path, drop=["total"]).classes == ("a", "b")
    with pytest.raises(InputError, match="no class 'sum'; accepted: a, b, total"):
        read_counts(path, drop=["sum"])


def test_a_message_does_not_list_thousands_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    names = [f"c{number}" for number in range(3000)]
    path.write_text(f"client,{','.join(names)}\nx{',1' * 3000}\n")
    told = f"accepted: {', '.join(names[:20])} and 2980 more"
    for drop in ("town", "client"):
        with pytest.raises(InputError) as caught:
            read_counts(path, drop=drop)
        assert str(caught.value).endswith(told)
    path.write_text("client,class,count\n" + "".join(f"x,{name},1\n" for name in names))
    with pytest.raises(InputError) as caught:
        read_counts(path, drop="town")
    assert str(caught.value).endswith(told)


def test_even_classes_are_no_total(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b\nx,1,1\ny,3,3\nz,4,4\n")
    assert read_counts(path).classes == ("a", "b")
    path.write_text("client,a,b,c\nx,1,2,3\n")  # by chance, of one client
    assert read_counts(path).classes == ("a", "b", "c")


def test_a_client_may_hold_what_all_others_do(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b\nx,5,0\ny,0,5\nz,5,5\n")  # two others: by chance, or by design
    assert read_counts(path).clients == ("x", "y", "z")
    path.write_text("client,a,b\nx,1,2\ny,3,0\nz,5,1\nlarge,9,3\n")
    assert read_counts(path, drop="none").clients == ("x", "y", "z", "large")
    path.write_text("client,total,n\nTotal,1,2\nsum,3,0\nall,5,1\n")  # whatever they are called
    assert read_counts(path, drop="none").counts.tolist() == [[1, 2], [3, 0], [5, 1]]


def test_numbers_of_samples_that_do_not_add_up_are_a_class(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,all,size\nx,1,2,9\nall,3,0,9\n")
    assert read_counts(path).classes == ("a", "all", "size")


def test_a_greek_letter_is_a_class_that_does_not_add_up(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,ρ,σ,τ\nx,1,2,9\ny,3,0,9\n")
    assert read_counts(path).classes == ("ρ", "σ", "τ")
    path.write_text("client,a,b,Σ\nx,1,2,3\ny,3,0,3\n")
    with pytest.raises(InputError, match="column 'Σ': equals the sum"):
        read_counts(path)


def test_three_decimals_are_decimals_where_another_cell_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("site.id,a,b\nx.100,1.234,2\ny.200,3,0.5\n")
    assert read_counts(path).counts.tolist() == [[1.234, 2], [3, 0.5]]
    path.write_text("site,a,b\nx,1.2340,2\n")  # what the refusal of 1.234 says
    assert read_counts(path).counts.tolist() == [[1.234, 2]]


def test_three_decimals_throughout_are_noise_or_weights(tmp_path: Path) -> None:
    """What `%.3f` writes of noisy counts and of a prior; where one number is whole, 1.234 may have been, too."""
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b\nx,1.234,20.000\ny,3.100,40.007\n")
    assert read_counts(path, noisy=True).counts.tolist() == [[1.234, 20], [3.1, 40.007]]
    with pytest.raises(InputError, match=r"'1\.234' may be 1234 or 1\.234"):
        read_counts(path)
    path.write_text("client,class,count\nx,a,1.234\nx,b,20.000\ny,b,3.100\n")
    assert read_counts(path, noisy=True).counts.tolist() == [[1.234, 20], [0, 3.1]]
    path.write_text("client,a,b\nx,1.234,20\ny,3.100,40.007\n")
    with pytest.raises(InputError, match=r"'1\.234' may be 1234 or 1\.234"):
        read_counts(path, noisy=True)
    path.write_text("class,weight\na,1.250\nb,2.500\n")
    assert read_target(path, ["a", "b"]).tolist() == [1.25, 2.5]
    path.write_text("class,weight\na,1.250\nb,2\n")
    with pytest.raises(InputError, match=r"'1\.250' may be 1250 or 1\.250"):
        read_target(path, ["a", "b"])


def test_numbers_stored_as_text(tmp_path: Path) -> None:
    """In a workbook 1.234 is a number, and the text 1.234 may be 1234 with a German thousands separator."""
    pandas = pytest.importorskip("pandas")
    for engine, suffix in (("openpyxl", ".xlsx"), ("pyarrow", ".parquet")):
        pytest.importorskip(engine, reason=f"{suffix} needs {engine}: pip install 'fedentopt[tables]'")
        path = tmp_path / f"counts{suffix}"
        for cell, other in ((1.234, 5.5), ("1.234", "0.5")):
            frame = pandas.DataFrame({"site": ["x", "y"], "a": [cell, other], "b": [2, 4]})
            frame.to_excel(path, index=False) if suffix == ".xlsx" else frame.to_parquet(path)
            assert read_counts(path).counts[0].tolist() == [1.234, 2]
        frame = pandas.DataFrame({"site": ["x", "y"], "a": ["1.234", "5"], "b": [2.5, 4.0]})
        frame.to_excel(path, index=False) if suffix == ".xlsx" else frame.to_parquet(path)
        with pytest.raises(InputError, match=r"row 2, column 'a': '1\.234' may be 1234 or 1\.234, and no other text"):
            read_counts(path)


def test_long_and_wide_tables_say_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, (40, 6)) + np.eye(6, dtype=int)[rng.integers(0, 6, 40)]
    wide, long = tmp_path / "wide.csv", tmp_path / "long.csv"
    wide.write_text("id,0,1,2,3,4,5\n" + "".join(f"s{k},{','.join(map(str, row))}\n" for k, row in enumerate(counts)))
    cells = [f"s{k},{c},{row[c]}\n" for k, row in enumerate(counts) for c in range(6) if row[c]]
    rng.shuffle(cells)
    long.write_text("id,label,count\n" + "".join(cells))
    first, second = read_counts(wide), read_counts(long)
    order = [second.clients.index(client) for client in first.clients]
    assert first.classes == second.classes
    assert (first.counts == second.counts[order]).all()


def test_excel_and_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"site": ["x", "y", "empty"], "a": [1, 3, 0], "b": [2.0, 4.0, 0.0]})
    for engine, suffix in (("openpyxl", ".xlsx"), ("pyarrow", ".parquet")):
        pytest.importorskip(engine, reason=f"{suffix} needs {engine}: pip install 'fedentopt[tables]'")
        path = tmp_path / f"counts{suffix}"
        for indexed in (False, True):
            written = frame.set_index("site") if indexed else frame
            written.to_excel(path, index=indexed) if suffix == ".xlsx" else written.to_parquet(path)
            file = read_counts(path)
            assert (file.clients, file.classes) == (("x", "y"), ("a", "b"))
            assert file.counts.tolist() == [[1, 2], [3, 4]]
            assert file.left_out == ("empty",)
        bad = pandas.DataFrame({"client": ["x", "y"], "a": ["1", "many"], "b": [2, 3]})
        bad.to_excel(path, index=False) if suffix == ".xlsx" else bad.to_parquet(path)
        with pytest.raises(InputError, match="row 3, column 'a': 'many' is not a number"):
            read_counts(path)
        path.write_bytes(b"nothing of the kind")
        with pytest.raises(InputError, match="cannot be read as"):
            read_counts(path)


def test_a_refusal_says_which_of_several_sheets_was_read(tmp_path: Path) -> None:
    pytest.importorskip("openpyxl")
    pandas = pytest.importorskip("pandas")
    with pandas.ExcelWriter(tmp_path / "book.xlsx") as book:
        pandas.DataFrame({"client": ["x"], "says": ["read me"]}).to_excel(book, sheet_name="Info", index=False)
        pandas.DataFrame({"client": ["x"], "a": [1]}).to_excel(book, sheet_name="Counts", index=False)
    with pytest.raises(InputError, match=r"book\.xlsx, sheet 'Info' \(the first\), row 2, column 'says': 'read me'"):
        read_counts(tmp_path / "book.xlsx")


def test_the_first_sheet_is_the_first_that_its_reader_sees(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="needs openpyxl: pip install 'fedentopt[tables]'")
    book = openpyxl.Workbook()
    book.active.title = "lists"
    book.active.append(["client", "choice"])
    book.active.append(["yes", 1])
    book.active.sheet_state = "hidden"
    counts = book.create_sheet("counts")
    for row in (["site", "a"], ["x", 3]):
        counts.append(row)
    book.active = 1
    path = tmp_path / "counts.xlsx"
    book.save(path)
    file = read_counts(path)
    assert (file.clients, file.classes) == (("x",), ("a",))
    assert f"{path}: read the first of 2 sheets that is not hidden, 'counts'" in file.notes
    counts.append(["y", "many"])
    book.save(path)
    with pytest.raises(InputError, match=r"counts\.xlsx, sheet 'counts' \(the first that is not hidden\), row 3"):
        read_counts(path)


def test_one_column_may_be_dropped_by_its_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b,total\nx,1,2,3\ny,3,4,7\n")
    assert read_counts(path, drop="total").classes == ("a", "b")
    assert read_counts(path, drop="none").classes == ("a", "b", "total")


def test_names_that_pandas_takes_for_nothing(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("openpyxl")
    frame = pandas.DataFrame({"site": ["NA", "null", "SE"], "None": [1, 0, 3], "N/A": [0, 5, 6]})
    frame.to_excel(tmp_path / "wide.xlsx", index=False)
    table = read_counts(tmp_path / "wide.xlsx")
    assert (table.clients, table.classes) == (("NA", "null", "SE"), ("None", "N/A"))
    assert table.counts.tolist() == [[1, 0], [0, 5], [3, 6]]
    # In a list of clients such a row was blank, and the client silently away.
    pandas.DataFrame({"site": ["NA", "SE"]}).to_excel(tmp_path / "here.xlsx", index=False)
    assert read_available(tmp_path / "here.xlsx", table) == ("NA", "SE")
    frame.loc[1, "N/A"] = None
    frame.to_excel(tmp_path / "gap.xlsx", index=False)
    with pytest.raises(InputError, match=r"gap\.xlsx, row 3, column 'N/A': the cell is empty"):
        read_counts(tmp_path / "gap.xlsx")


def test_text_that_a_parquet_file_holds_as_bytes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    clients = ["Köln".encode(), b"Bonn", b"\xff\xfe"]
    pandas.DataFrame({"client": clients, "a": [1, 2, 3], "b": [3, 2, 2]}).to_parquet(tmp_path / "counts.parquet")
    assert read_counts(tmp_path / "counts.parquet").clients == ("Köln", "Bonn", "\\xff\\xfe")


@pytest.mark.parametrize(("name", "package"), [("counts.xlsx", "openpyxl"), ("counts.parquet", "pyarrow")])
def test_what_reads_them_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    import sys

    path = tmp_path / name
    path.write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        InputError, match=r"needs .*pip install 'fedentopt\[tables\]' brings it, or save the table as CSV"
    ):
        read_counts(path)
    with pytest.raises(InputError, match="No such file"):
        read_counts(tmp_path / f"no-{name}")
    with pytest.raises(InputError, match="files of this kind are not read"):
        read_counts(tmp_path / "old.xls")


def test_who_is_available(tmp_path: Path) -> None:
    path, here = tmp_path / "counts.csv", tmp_path / "here.txt"
    path.write_text('site,a,b\nx,1,2\n"Bonn, Nord",1,2\nnobody,0,0\nz,3,4\n')
    table = read_counts(path)
    for content in ("z\nBonn, Nord\n", 'site\nz\n\n"Bonn, Nord"\n', "z,5\nBonn, Nord\nz\nnobody\n"):
        here.write_text(content)
        assert read_available(here, table) == ("z", "Bonn, Nord"), content
    bad = {"z\nw\n": "line 2: 'w' is not in the table", "\n": "names no client", "nobody\n": "names no client"}
    for content, message in bad.items():
        here.write_text(content)
        with pytest.raises(InputError, match=message):
            read_available(here, table)


def test_a_target_may_have_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "target.csv"
    path.write_text("class;weight\nb;0,25\na;0,75\n")
    assert read_target(path, ("a", "b")).tolist() == [0.75, 0.25]
