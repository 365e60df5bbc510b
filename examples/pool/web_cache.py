"""A web server whose pages take a while to make, and a cache for them that may vanish.

    strata pool create pages --limit 256MiB
    strata run --dram 64MiB -- python3 web_cache.py --pool pages --port 8080
    curl -i localhost:8080/report/7          # X-Cache: miss, then hit
    curl -X DELETE localhost:8080/report/7   # what it shows has changed

The cache is outside of the server's budget, compressed, and shared by all servers of the
user that use the same pool. When the machine needs the memory it is gone at once, and the
server goes on making pages. Without Strata, or without the pool, it makes each page anew."""

import argparse
import http.server
import random
import sys
import time

import strata

# Raised when pages look otherwise: what was cached before is not found then.
VERSION = 1


def make(path):
    """Some hundred kilobytes that take a while."""
    time.sleep(0.05)
    words = random.Random(path)
    rows = (f"<tr><td>{row}</td><td>{words.random():.6f}</td></tr>" for row in range(5000))
    return f"<title>{path}</title><table>{''.join(rows)}</table>\n".encode()


class Page(http.server.BaseHTTPRequestHandler):
    cache = None

    def do_GET(self):
        page = self.cache.get(self.path)
        found = page is not None
        if not found:
            page = make(self.path)
            self.cache.put(self.path, page)
        self.answer(200, page, [("X-Cache", "hit" if found else "miss")])

    def do_DELETE(self):
        if self.cache.flush(self.path):
            self.answer(204, b"")
        else:
            self.answer(503, f"it may still be cached: {self.cache.error}\n".encode())

    def answer(self, status, body, more=()):
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), *more):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    arguments.add_argument("--pool", required=True)
    arguments.add_argument("--port", type=int, default=0)
    wish = arguments.parse_args()
    Page.cache = strata.Cache(wish.pool, f"web-cache-{VERSION}")
    Page.cache.get("")
    if Page.cache.error:
        print(f"web_cache: each page is made anew: {Page.cache.error.strerror}", file=sys.stderr)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", wish.port), Page)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
