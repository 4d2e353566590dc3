"""A user's mistake: one line `error: …` on stderr that says what to do, and an exit status; no traceback."""

import contextlib
import os
import signal
import sys
import time


class UserError(ValueError):
    """Something the user can fix. The message is made one line of at most about 1000 characters."""

    def __init__(self, message, status=2):
        text = " ".join(str(message).split())
        super().__init__(text if len(text) <= 1000 else f"{text[:500]} … {text[-500:]}")
        self.status = status


def refuse(condition, sentence, status=2):
    if condition:
        raise UserError(sentence, status)


def one_line(error):
    """Another library's exception as part of an error line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextlib.contextmanager
def user_error_from_os(action):
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {action} ({error.strerror or error})") from error


# --- a script's main --------------------------------------------------------------------------------------------------


class OptionalOutput:
    """stdout or stderr for a script whose work matters more than its words: a failed write is noted, never raised."""

    def __init__(self, file, lost):
        self.file, self.lost = file, lost

    def write(self, text):
        self._note_failure(self.file.write, text)
        return len(text)

    def flush(self):
        self._note_failure(self.file.flush)

    def _note_failure(self, function, *args):
        try:
            function(*args)
        except OSError:  # no reader, a full disk
            self.lost = True

    def __getattr__(self, name):
        return getattr(self.file, name)


def run_main(main, output_optional=False):
    """
    Call a script's main() and end with its exit status. output_optional: where stdout or stderr is closed or full, the
    work is done all the same, and exit status 1 says in the end that output was lost.
    """
    while os.open(os.devnull, os.O_RDWR) < 2:  # a closed 0, 1 or 2 would go to the next file, and stray output with it
        pass
    closed = {name for name in ("stdout", "stderr") if getattr(sys, name) is None}
    for name in closed:
        setattr(sys, name, open(os.devnull, "w"))
    sys.stdout.reconfigure(errors="replace")  # a name or text that this terminal cannot show is no reason to end
    if output_optional:
        sys.stdout = OptionalOutput(sys.stdout, lost="stdout" in closed)
        sys.stderr = OptionalOutput(sys.stderr, lost="stderr" in closed)
    status = exit_status(main) or exit_status(sys.stdout.flush)
    if output_optional and not status and (sys.stdout.lost or sys.stderr.lost):
        status = 1
    for file in (sys.__stdout__, sys.__stderr__):
        point_to_null_if_broken(file)
    sys.exit(status)


def exit_status(main):
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":  # if all processes have this error, torchrun ends us with rank 0
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has had enough
        return 141
    except OSError as error:  # a folder that may not be written, a full disk
        print(f"error: {error}", file=sys.stderr)
        return 2


def point_to_null_if_broken(file):
    """What is left in the buffer would otherwise fail again when Python ends, with a complaint and status 120."""
    try:
        if file is not None:  # None: it was closed from the start
            file.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
