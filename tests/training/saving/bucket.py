"""Buckets of Google Cloud Storage and S3 in this process: objects without folders, never appended to or renamed.

orbax writes arrays through tensorstore, whose drivers speak HTTP to the address in an environment variable, and all
other files through fsspec. Both see the same objects here.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

URL = "TENSORSTORE_GCS_HTTP_URL"


class Bucket:
    """Objects by name, with the generation that every write makes anew."""

    def __init__(self, name):
        self.name, self.objects, self.lock, self.generations = name, {}, threading.Lock(), count(1)
        self.fault = None  # status and message with which all requests fail

    def put(self, name, content, match=None):
        with self.lock:
            found = self.objects.get(name)
            if match is not None and match != (found[1] if found else 0):
                return None
            self.objects[name] = bytes(content), next(self.generations)
            return self.objects[name][1]

    def delete(self, name, match=None):
        with self.lock:
            found = self.objects.get(name)
            if found is None:
                return 404
            if match not in (None, found[1]):
                return 412
            del self.objects[name]
            return 204


def handler_of(bucket):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, body=b"", **headers):
            if isinstance(body, dict):
                body = json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def target(self):
            """The object that the request names, and its parameters; None after a reply that says what is wrong."""
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            _, _, rest = parts.path.partition("/b/")
            name, _, found = rest.partition("/o")
            if bucket.fault:
                self.reply(bucket.fault[0], {"error": {"code": bucket.fault[0], "message": bucket.fault[1]}})
            elif name != bucket.name:
                self.reply(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
            else:
                return unquote(found.removeprefix("/")), query
            return None

        def do_GET(self):
            found = self.target()
            if found is None:
                return
            name, query = found
            if not name:
                first, end = query.get("startOffset", ""), query.get("endOffset", "\uffff")
                names = sorted(n for n in bucket.objects if first <= n < end and n.startswith(query.get("prefix", "")))
                return self.reply(200, {"items": [describe(n) for n in names]})
            if name not in bucket.objects:
                return self.reply(404)
            content, generation = bucket.objects[name]
            if query.get("ifGenerationNotMatch") == str(generation):
                return self.reply(304)
            if query.get("ifGenerationMatch", str(generation)) != str(generation):
                return self.reply(412)
            if query.get("alt") != "media":
                return self.reply(200, describe(name))
            tags, wanted = {"x_goog_generation": generation}, self.headers.get("Range")
            if wanted is None:
                return self.reply(200, content, **tags)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            first = int(first) if first else len(content) - int(last)
            end = int(last) + 1 if last and wanted[6] != "-" else len(content)
            part = content[first:end]
            tags["Content_Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
            return self.reply(206, part, **tags)

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = self.target()
            if found is None:
                return
            _, query = found
            match = query.get("ifGenerationMatch")
            generation = bucket.put(query["name"], content, None if match is None else int(match))
            self.reply(412) if generation is None else self.reply(200, describe(query["name"]))

        def do_DELETE(self):
            found = self.target()
            if found is not None:
                match = found[1].get("ifGenerationMatch")
                self.reply(bucket.delete(found[0], None if match is None else int(match)))

    def describe(name):
        content, generation = bucket.objects[name]
        return {"name": name, "bucket": bucket.name, "generation": str(generation), "size": str(len(content))}

    return Handler


def s3_handler_of(bucket):
    """The requests of tensorstore's driver for S3; nothing is signed, and a list has one page."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status, code):
            self.reply(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

        def answer(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            place, _, name = unquote(parts.path).removeprefix("/").partition("/")
            if bucket.fault:
                return self.refuse(*bucket.fault)
            if place != bucket.name:
                return self.refuse(404, "NoSuchBucket")
            if self.command == "GET" and not name:
                prefix = parse_qs(parts.query).get("prefix", [""])[0]
                keys = [n for n in sorted(bucket.objects) if n.startswith(prefix)]
                rows = "".join(
                    f"<Contents><Key>{n}</Key><Size>{len(bucket.objects[n][0])}</Size></Contents>" for n in keys
                )
                body = f"<ListBucketResult><KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>{rows}"
                return self.reply(200, (body + "</ListBucketResult>").encode())
            found, tag = bucket.objects.get(name), self.headers.get("If-Match", "").strip('"')
            if self.command == "PUT":
                match = int(tag) if tag else 0 if self.headers.get("If-None-Match") == "*" else None
                generation = bucket.put(name, content, match)
                return (
                    self.refuse(412, "PreconditionFailed")
                    if generation is None
                    else self.reply(200, ETag=f'"{generation}"')
                )
            if found is None:
                return self.refuse(404, "NoSuchKey")
            if tag and tag != str(found[1]):
                return self.refuse(412, "PreconditionFailed")
            if self.command == "DELETE":
                bucket.delete(name)
                return self.reply(204)
            return self.reply(200, found[0], ETag=f'"{found[1]}"')

        do_GET = do_HEAD = do_PUT = do_DELETE = answer

    return Handler


class BucketFileSystem(AbstractFileSystem):
    """The objects of ``bucket`` as fsspec has them: folders are what names have before a slash."""

    protocol = ("gcs", "gs")
    cachable = False
    bucket = None

    def __init__(self, *args, finalize_on_close=True, **kwargs):
        super().__init__(*args, **kwargs)

    def _split(self, path):
        name, _, rest = self._strip_protocol(path).partition("/")
        if name != self.bucket.name:
            raise FileNotFoundError(f"b/{name}: The specified bucket does not exist.")
        return rest

    def ls(self, path, detail=True, **_):
        rest = self._split(path)
        prefix = rest.rstrip("/") + "/" if rest else ""
        found = {}
        for name, (content, _) in list(self.bucket.objects.items()):
            if name.startswith(prefix) and name != prefix:
                head, deeper, _ = name[len(prefix) :].partition("/")
                found[head] = ("directory", 0) if deeper else ("file", len(content))
        if not found and rest in self.bucket.objects:
            found, prefix = {rest: ("file", len(self.bucket.objects[rest][0]))}, ""
        if not found and rest and prefix not in self.bucket.objects:
            raise FileNotFoundError(path)
        rows = [
            {"name": f"{self.bucket.name}/{prefix}{name}", "type": kind, "size": size}
            for name, (kind, size) in sorted(found.items())
        ]
        return rows if detail else [row["name"] for row in rows]

    def _open(self, path, mode="rb", **_):
        name = self._split(path)
        if mode == "rb":
            if name not in self.bucket.objects:
                raise FileNotFoundError(path)
            return BytesIO(self.bucket.objects[name][0])
        assert mode == "wb", mode  # objects are written whole
        bucket = self.bucket

        class Written(BytesIO):
            def close(self):
                if not self.closed:
                    bucket.put(name, self.getvalue())
                super().close()

        return Written()

    def mkdir(self, path, create_parents=True, **_):
        self._split(path)

    def makedirs(self, path, exist_ok=False):
        self._split(path)

    def rmdir(self, path):
        self._split(path)

    def _rm(self, path):
        self.bucket.delete(self._split(path))

    def rm(self, path, recursive=False, maxdepth=None):
        name = self._split(path)
        names = [n for n in self.bucket.objects if n == name or (recursive and n.startswith(f"{name}/"))]
        if not names:
            raise FileNotFoundError(path)
        for each in names:
            self.bucket.delete(each)

    def cp_file(self, source, target, **_):
        if self._split(source) not in self.bucket.objects:  # a folder
            return
        self.bucket.put(self._split(target), self.bucket.objects[self._split(source)][0])


@contextmanager
def served(monkeypatch, name="bucket"):
    """A bucket that orbax and epath find at ``gs://name`` meanwhile."""
    from orbax.checkpoint._src.path import gcs_utils

    bucket = Bucket(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(bucket))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(URL, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    monkeypatch.setattr(BucketFileSystem, "bucket", bucket)
    monkeypatch.setattr(gcs_utils, "get_bucket", lambda _: None)  # which asks whether it has folders
    for protocol in BucketFileSystem.protocol:
        fsspec.register_implementation(protocol, BucketFileSystem, clobber=True)
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def served_s3(monkeypatch, name="bucket"):
    """A bucket that tensorstore finds at ``s3://name`` meanwhile."""
    bucket = Bucket(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), s3_handler_of(bucket))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
