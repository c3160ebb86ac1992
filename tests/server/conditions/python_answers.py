"""Calls in Python's notation, by LFM2 and OLMo 3."""

from __future__ import annotations

from tests.server.conditions.condition import LS, PWD, START, STOP, called, condition, hermes, lfm

PYTHON = [
    condition("LFM2", "lfm2", lfm("[run(command='ls')]"), LS),
    condition("LFM2, double quotes", "lfm2", lfm('[run(command="ls")]'), LS),
    condition("LFM2, text around", "lfm2", f"So. {lfm('[now()]')}\nDone.", called("now"), content="So.Done."),
    condition("LFM2, several", "lfm2", lfm("[run(command='ls'), now(), run(command='pwd')]"), LS, called("now"), PWD),
    condition(
        "LFM2, types",
        "lfm2",
        lfm("[opt(number=-2.5, flag=True, maybe=None, array=['a', 1], object={'k': [None, False]})]"),
        called("opt", number=-2.5, flag=True, maybe=None, array=["a", 1], object={"k": [None, False]}),
    ),
    condition("LFM2, JSON's words", "lfm2", lfm("[opt(flag=true, maybe=null)]"), called("opt", flag=True, maybe=None)),
    condition("LFM2, no list", "lfm2", lfm("run(command='ls')"), LS),
    condition("LFM2, white space", "lfm2", f"{START} [ run( command = 'ls' ) ] {STOP}", LS),
    condition(
        "LFM2, escapes",
        "lfm2",
        lfm(r"[run(command='it\'s \"x\" \n \\ \x41')]"),
        called("run", command='it\'s "x" \n \\ A'),
    ),
    condition(
        "LFM2, escapes that Python does not know",
        "lfm2",
        lfm(r"[run(command='\d+ \( ')]"),
        called("run", command=r"\d+ \( "),
    ),
    condition(
        "LFM2, raw line end",
        "lfm2",
        lfm("[run(command='cat << E\nimport x\nE')]"),
        called("run", command="cat << E\nimport x\nE"),
    ),
    condition("LFM2, three quotes", "lfm2", lfm('[run(command="""a "b"\nc""")]'), called("run", command='a "b"\nc')),
    condition("LFM2, raw string", "lfm2", lfm(r"[run(command=r'\n')]"), called("run", command=r"\n")),
    condition(
        "LFM2, nested quotes", "lfm2", lfm("[run(command='sed -n '3,4p' f')]"), called("run", command="sed -n '3,4p' f")
    ),
    condition(
        "LFM2, nested quotes and another",
        "lfm2",
        lfm("[run(command='sed -n '3,4p' f', note='x')]"),
        called("run", command="sed -n '3,4p' f", note="x"),
    ),
    condition(
        "LFM2, Python in quotes",
        "lfm2",
        lfm("[run(command='python3 -c \"from s import l\nprint(l(3*x, m='\\,'))\"')]"),
        called("run", command="python3 -c \"from s import l\nprint(l(3*x, m='\\,'))\""),
    ),
    condition(
        "LFM2, brackets in a string",
        "lfm2",
        lfm("[run(command='grep -F \"]\" (x')]"),
        called("run", command='grep -F "]" (x'),
    ),
    condition("LFM2, NUL", "lfm2", lfm("[run(command='a\x00b')]"), called("run", command="a\x00b")),
    condition("LFM2, leading zeros", "lfm2", lfm("[opt(whole=07, number=05)]"), called("opt", whole=7, number=5)),
    condition("LFM2, a number for a string", "lfm2", lfm("[run(command=007)]"), called("run", command="007")),
    condition("LFM2, set", "lfm2", lfm("[opt(array={'u', 'b'})]"), called("opt", array=["u", "b"])),
    condition("LFM2, tuple", "lfm2", lfm("[opt(array=(1, 2))]"), called("opt", array=[1, 2])),
    condition(
        "LFM2, dotted name",
        "lfm2",
        lfm("[shop.order(items=[{'name': 'a', 'n': 2}], to='x, y')]"),
        called("shop.order", items=[{"name": "a", "n": 2}], to="x, y"),
    ),
    condition("LFM2, dash in the name", "lfm2", lfm("[get-time(zone='CET')]"), called("get-time", zone="CET")),
    condition(
        "LFM2, keyword as parameter",
        "lfm2",
        lfm("[run(from='a', command='ls')]"),
        called("run", **{"from": "a", "command": "ls"}),
    ),
    condition("LFM2, dash in a parameter", "lfm2", lfm("[run(max-count=3)]"), called("run", **{"max-count": 3})),
    condition("LFM2, JSON", "lfm2", lfm(f"[{hermes('ls')}]"), LS),
    condition("LFM2, a comma too many", "lfm2", lfm("[run(command='ls',)]"), LS),
    condition("LFM2, no closing", "lfm2", f"{START}[run(command='ls')]", LS),
    condition("LFM2, no closing of the list", "lfm2", f"{START}[run(command='ls'){STOP}", LS),
    condition("LFM2, cut in a string", "lfm2", f"{START}[run(command='ls", LS),
    condition("LFM2, echo", "lfm2", f"{lfm('[run(command=1)]')}[run(command=1)]{STOP}", called("run", command="1")),
    condition("LFM2, echo and more", "lfm2", f"{lfm('[now()]')}[now()]{STOP}Done", called("now"), content="Done"),
    condition(
        "LFM2, bad one first", "lfm2", lfm("[bad(x=b'z'), run(command='ls')]"), LS, content=f"{START}[bad(x=b'z'),"
    ),
    condition(
        "LFM2, bad one last", "lfm2", lfm("[run(command='ls'), bad(x=b'z')]"), LS, content=f", bad(x=b'z')]{STOP}"
    ),
    condition("LFM2, unknown function", "lfm2", lfm("[other(x=1)]"), called("other", x=1)),
    condition("LFM2, no calls", "lfm2", lfm("[]"), content=lfm("[]")),
    condition(
        "LFM2, prose",
        "lfm2",
        f"The tag {START} opens a call (of f). [x](y)",
        content=f"The tag {START} opens a call (of f). [x](y)",
    ),
    condition("LFM2, positional argument", "lfm2", lfm("[run('ls')]"), content=lfm("[run('ls')]")),
    condition("OLMo 3", "olmo3", "<function_calls>run(command='ls')\nrun(command='pwd')</function_calls>", LS, PWD),
    condition(
        "OLMo 3, text", "olmo3", "So.<function_calls>\nnow()\n</function_calls>\nDone", called("now"), content="So.Done"
    ),
    condition(
        "OLMo 3, bad one first",
        "olmo3",
        "<function_calls>bad(x=b'z')\nrun(command='ls')</function_calls>",
        LS,
        content="<function_calls>bad(x=b'z')",
    ),
    condition(
        "OLMo 3, too large a number",
        "olmo3",
        "<function_calls>bad(x=1e999)\nnow()</function_calls>",
        called("now"),
        content="<function_calls>bad(x=1e999)",
    ),
    condition("OLMo 3, prose", "olmo3", "The tag <function_calls> is one.", content="The tag <function_calls> is one."),
]
