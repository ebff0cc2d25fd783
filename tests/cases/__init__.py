"""Small inputs that real servers answered wrongly, and those that only a router has, by the id of the case.

The tests of this package go through HTTP, the api and real workers in one event loop (`stack.py`). Cases that another test
covers at the same depth or deeper stay there; a case in brackets has a further test at the depth of the api alone.

C-01 test_text.py (tests/api/test_text.py)
C-02 test_text.py (tests/api/test_text.py, test_properties.py: any text, any cut)
C-04 test_text.py (tests/api/test_stream.py)
C-06 test_text.py (tests/api/test_text.py)
C-07 test_errors.py (tests/api/test_stream.py)
C-08 test_text.py (tests/api/test_stream.py)
C-09, C-11 logprobs and echo are refused: tests/api/test_refusals.py::test_unsupported_parameters
C-12 test_limits.py (tests/api/test_refusals.py)
C-14 test_text.py (tests/api/test_text.py)
C-17a test_limits.py (tests/api/test_refusals.py)
C-17b test_limits.py (tests/api/test_routes.py)
C-19 test_disconnects.py; whole daemon: tests/daemon/test_daemon.py::test_clients_that_go_away
C-20 tests/daemon/test_daemon.py::test_no_false_disconnects, tests/api/test_lifecycle.py::test_c20_many_streams_all_complete
C-21 tests/models/test_memory.py
C-22 tests/worker/test_races.py, tests/worker/test_faults.py::test_tight_pools_and_random_aborts
C-25 test_prefix_cache.py, tests/worker/test_oracle.py::test_page_sizes_and_prefix_cache
C-27a tests/daemon/test_daemon.py::test_dead_worker_is_named_and_comes_back
C-27b, C-27c tests/daemon/test_stalls.py; tests/api/test_lifecycle.py::test_c27_probes_reach_no_worker
C-28 tests/daemon/test_daemon.py::test_children_die_with_the_supervisor_and_the_socket_is_free
     and, with a call that holds the interpreter's lock, tests/supervisor/test_children.py
C-30 tests/daemon/test_stalls.py
C-32 tests/daemon/test_ends.py
R-1, R-2 test_disconnects.py; tests/worker/test_faults.py::test_repeated_messages_are_applied_once: any order
R-3 test_handoffs.py
R-5 test_limits.py; refusal to start: tests/daemon/test_ends.py
R-6 test_limits.py
R-9 tests/daemon/test_daemon.py::test_live_threshold_during_streams
R-10 test_handoffs.py; tests/worker/test_oracle.py::test_copies_of_one_model_write_what_it_writes_alone
"""
