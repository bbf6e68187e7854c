"""Looks at pages in a browser of this machine, without a package for it: pages in frames, a script that measures."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

PROBE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];

function measure(frame) {
  const doc = frame.contentDocument, problems = [], root = doc.documentElement;
  if (root.scrollWidth > frame.clientWidth + 1) problems.push(`is ${root.scrollWidth} wide`);
  for (const image of doc.images) if (!image.naturalWidth) problems.push(`has no image ${image.src}`);
  for (const pre of doc.querySelectorAll("pre > code")) {
    const how = frame.contentWindow.getComputedStyle(pre).overflowX;
    if (pre.scrollWidth > pre.clientWidth + 1 && how == "visible") problems.push("has a block that does not scroll");
  }
  const range = doc.createRange();
  for (const cell of doc.querySelectorAll("article td, article th")) {
    const texts = doc.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/\\w+/g)) {
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (range.getClientRects().length > 1) problems.push(`breaks the word ${word[0]} of a table`);
    }
  }
  return problems;
}

async function look(page) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${widths[0]}px; height: 900px; border: 0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(resolve => frame.onload = resolve);
  for (let tries = 0; tries < 50; tries++) {  // until the theme's script has put tables into boxes
    const waits = [...frame.contentDocument.querySelectorAll("article table:not([class])")]
      .some(table => !table.closest(".md-typeset__table"));
    if (!waits) break;
    await new Promise(resolve => setTimeout(resolve, 50));
  }
  for (const width of widths) {
    frame.style.width = `${width}px`;
    await new Promise(resolve => setTimeout(resolve, 500));  // drawers slide
    for (const problem of measure(frame)) found.push(`${page} at ${width} px ${problem}`);
  }
  frame.remove();
}

(async () => {
  await Promise.all(Array.from({length: 4}, async () => { while (pages.length) await look(pages.pop()); }));
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})().catch(error => fetch("/found", {method: "POST", body: JSON.stringify([String(error)])}));
</script>"""


def browser() -> str | None:
    """Returns the path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def problems_of(site: Path, pages: Sequence[str], widths: Sequence[int], limit_s: float) -> list[str]:
    """Returns what is wrong with pages of a site, each at each width in pixels.

    Raises:
        TimeoutError: the browser has not answered.
    """
    answer: list[Any] = []
    answered = threading.Event()
    probe = PROBE.replace("PAGES", json.dumps(list(pages))).replace("WIDTHS", json.dumps(list(widths)))

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/probe":
                self._send("text/html", probe)
            elif "/workers/" in self.path:  # the search, which reads all pages again in each frame
                self._send("text/javascript", "")
            else:
                super().do_GET()

        def _send(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            answer.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            answered.set()

        def log_message(self, *_: Any) -> None:
            pass

    program = browser()
    assert program is not None
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        address = f"http://127.0.0.1:{server.server_address[1]}/probe"
        process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if not answered.wait(limit_s):
                raise TimeoutError(f"{program} has not answered after {limit_s:g} s")
        finally:
            process.terminate()
            process.wait(30)
            server.shutdown()
    return answer
