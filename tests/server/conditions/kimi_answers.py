"""Calls in the notation of Kimi."""

from __future__ import annotations

import json

from tests.server.conditions.condition import AB, CUT, LS, OPEN, PWD, SB, SE, TB, TE, called, condition, kimi

KIMI = [
    condition("Kimi", "kimi_k2", f"So. {SB}{kimi('functions.run:0', json.dumps(LS[1]))}{SE}", LS, content="So."),
    condition(
        "Kimi, several",
        "kimi_k2",
        f"{SB}{kimi('functions.run:0', json.dumps(LS[1]))}{kimi('functions.run:1', json.dumps(PWD[1]))}{SE}",
        LS,
        PWD,
    ),
    condition(
        "Kimi, no prefix, white space",
        "kimi_k2",
        f"{SB}\n{TB} run:0 {AB} {json.dumps(LS[1])} {TE}\n{SE}\nDone",
        LS,
        content="Done",
    ),
    condition("Kimi, no arguments", "kimi_k2", f"{SB}{kimi('functions.now:0', '')}{SE}", called("now")),
    condition(
        "Kimi, a line end within", "kimi_k2", f"{SB}{kimi('functions.run:0', json.dumps(LS[1], indent=2))}{SE}", LS
    ),
    condition("Kimi, no number", "kimi_k2", f"{SB}{kimi('functions.run', json.dumps(LS[1]))}{SE}", LS),
    condition(
        "Kimi, bad JSON first",
        "kimi_k2",
        f"{SB}{kimi('functions.run:0', CUT)}{kimi('functions.run:1', json.dumps(LS[1]))}{SE}",
        called("run", command="l"),
        LS,
    ),
    condition("Kimi, a bracket missing", "kimi_k2", f"{SB}{kimi('functions.run:0', OPEN)}{SE}", LS),
    condition(
        "Kimi, bad id first",
        "kimi_k2",
        f"{SB}{kimi('functions.x.0', '{}')}{kimi('functions.run:1', json.dumps(LS[1]))}{SE}",
        LS,
        content=f"{SB}{kimi('functions.x.0', '{}')}",
    ),
    condition("Kimi, noise", "kimi_k2", f"{SB} now {kimi('functions.run:0', json.dumps(LS[1]))}{SE}", LS),
    condition("Kimi, no section", "kimi_k2", f"So. {kimi('functions.run:0', json.dumps(LS[1]))}", LS, content="So."),
    condition("Kimi, no ends", "kimi_k2", f"{SB}{TB}functions.run:0{AB}{json.dumps(LS[1])}", LS),
    condition(
        "Kimi, an end in a string",
        "kimi_k2",
        f"{SB}{kimi('functions.run:0', json.dumps({'command': f'a {TE} b'}))}{SE}",
        called("run", command=f"a {TE} b"),
    ),
    condition(
        "Kimi, in the thinking",
        "kimi_k2",
        f"hm\n{SB}{kimi('functions.run:0', json.dumps(LS[1]))}{SE}",
        LS,
        reasoning="hm",
        inside=True,
    ),
    condition(
        "Kimi, prose",
        "kimi_k2",
        f"The tag {SB} begins a section, and so on for a long time.",
        content=f"The tag {SB} begins a section, and so on for a long time.",
    ),
]
