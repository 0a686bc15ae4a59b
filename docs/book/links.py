"""Every local link and anchor of the site that `make book` built; outside links are listed, not fetched.

python docs/book/links.py          exit code 1 if a page, a picture or an anchor is not there, or if a page
                                   would load a script, a style or a picture from a network
"""

import html
import re
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parents[2] / "build/book/site"
TAG = re.compile(r"<(a|img|script|link|source|iframe|object)\b([^>]*)>")
LINK = re.compile(r"""\b(?:href|src|data)=(?:"([^"]*)"|'([^']*)'|([^\s>]+))""")
ANCHOR = re.compile(r"""\b(?:id|name)=(?:"([^"]*)"|'([^']*)'|([^\s>]+))""")
COMMENT = re.compile(r"<!--.*?-->|<script\b[^>]*>.*?</script>", re.DOTALL)


def read(page: Path) -> str:
    """HTML without comments and the bodies of scripts."""
    opened = lambda found: "" if found[0].startswith("<!") else found[0][: found[0].index(">") + 1]
    return COMMENT.sub(opened, page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    tags = re.findall(r"<[a-zA-Z][^>]*>", read(page))
    return frozenset(html.unescape("".join(one)) for tag in tags for one in ANCHOR.findall(tag))


def main() -> int:
    begun, broken, outside, count = time.time(), [], Counter(), 0
    if not (SITE / "index.html").exists():
        sys.exit("there is no site yet: make book")
    pages = sorted(page for page in SITE.rglob("*.html") if "_static" not in page.parts)
    for page in pages:
        links = {
            (tag, html.unescape("".join(one)))
            for tag, rest in TAG.findall(read(page))
            for one in LINK.findall(rest)
        }
        for tag, link in links:
            parts, said = urlsplit(link), f"{page.relative_to(SITE)}: {link}"
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                outside[link] += 1
                if tag != "a":
                    broken.append(f"{said} needs a network")
                continue
            count += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append(said)
            elif parts.fragment and target.suffix == ".html" and not parts.fragment.startswith("?"):
                if unquote(parts.fragment) not in anchors(target):
                    broken.append(f"{said} (no such anchor)")
    (SITE.parent / "outside.txt").write_text(
        "".join(f"{n:5} {link}\n" for link, n in sorted(outside.items()))
    )
    hosts = Counter(urlsplit(link).netloc for link in outside)
    print("\n".join(sorted(broken)))
    print(f"{count:,} local links on {len(pages):,} pages, {len(broken)} broken, {time.time() - begun:.0f} s")
    told = ", ".join(f"{host} {n}" for host, n in hosts.most_common(8))
    print(f"{len(outside)} links to elsewhere, not fetched, in build/book/outside.txt: {told}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
