"""The tables. Every column but the arrays can be read with plain SQL while the run goes on.

Arrays are BLOBs, little-endian, one dtype per column (see `codec`):
`rollout_group.prompt_tokens` int32 [P]; `rollout.token_ids` int32 [T], `loss_mask` uint8 [T], `logp` and
`logp_behaviour` float32 [T], `serials` int32 [T]; `experts` uint16, L and k and then [P + T - 1, L, k] (NULL where none
were recorded). All are NULL once a trained group is pruned; text and rewards stay.

The views `groups` and `rollouts` leave the arrays out:
`SELECT text, reward, reward_parts FROM rollouts WHERE state = 'trained' ORDER BY reward`.
"""

from __future__ import annotations

APPLICATION_ID = 0x54495448  # "TITH", shown by file(1)
SCHEMA_VERSION = 4

DDL = """
CREATE TABLE pool_state (
    one            INTEGER PRIMARY KEY CHECK (one = 1),
    run_id         TEXT    NOT NULL,
    owner_epoch    INTEGER NOT NULL,   -- rises whenever a writer opens the pool; ends the leases of the one before
    serial         INTEGER NOT NULL,   -- batches trained
    next_group_id  INTEGER NOT NULL,
    prompt_cursor  INTEGER NOT NULL,   -- prompts drawn from the shuffled order so far
    prompt_digest  TEXT                -- identity of the prompt set and its order
);
CREATE TABLE rollout_group (
    group_id        INTEGER PRIMARY KEY,
    prompt_id       TEXT    NOT NULL,
    lineage         INTEGER NOT NULL,
    admitted_serial INTEGER NOT NULL,
    admitted_batch  INTEGER NOT NULL DEFAULT 0,  -- the batch it is for, unless another overtakes it
    phase           TEXT    NOT NULL DEFAULT '',  -- the schedule's phase at its admission; empty without one
    n_samples       INTEGER NOT NULL DEFAULT 1,  -- rollouts that it has or will have
    pass_rate       REAL,              -- share of right answers; NULL: nothing was scored
    state           TEXT    NOT NULL CHECK (state IN ('running', 'ready', 'leased', 'trained', 'dropped')),
    min_serial      INTEGER,           -- oldest token of any member
    max_serial      INTEGER,
    batch_serial    INTEGER,           -- the batch it was trained in; after a rewind, its place in the queue
    batch_position  INTEGER,
    reason          TEXT,              -- why it was dropped
    detail          TEXT NOT NULL DEFAULT '',
    requeues        INTEGER NOT NULL DEFAULT 0,
    admitted_at_s   REAL    NOT NULL,  -- Unix time
    finished_at_s   REAL,
    left_at_s       REAL,
    prompt_tokens   BLOB
);
CREATE INDEX group_by_state ON rollout_group (state);
CREATE INDEX group_by_prompt ON rollout_group (prompt_id);
CREATE UNIQUE INDEX one_group_per_batch_place ON rollout_group (batch_serial, batch_position)
    WHERE state = 'trained';
CREATE TABLE rollout (
    group_id        INTEGER NOT NULL REFERENCES rollout_group (group_id),
    sample          INTEGER NOT NULL,
    reward          REAL,              -- NULL: unscored, or the grader abstained
    reward_parts    TEXT    NOT NULL,  -- JSON object of numbers
    reason          TEXT,              -- why there is no usable result, or why the reward is what it is
    cause           TEXT,              -- FailureCause
    finish          TEXT    NOT NULL,
    n_tokens        INTEGER NOT NULL,
    min_serial      INTEGER,
    max_serial      INTEGER,
    temperature     REAL    NOT NULL,
    text            TEXT    NOT NULL,
    token_ids       BLOB,
    loss_mask       BLOB,
    logp            BLOB,
    logp_behaviour  BLOB,
    serials         BLOB,
    experts         BLOB,
    grader          TEXT,              -- who judged, with a version
    PRIMARY KEY (group_id, sample)
);
CREATE TABLE put_back (
    position  INTEGER PRIMARY KEY,     -- lowest first
    prompt_id TEXT,                    -- NULL: any prompt
    group_id  INTEGER,                 -- the id that a group had when it was given up, and takes again
    n_samples INTEGER NOT NULL         -- the size that the group had, so that batches stay whole
);
CREATE TABLE checkpoint (
    serial       INTEGER PRIMARY KEY,
    directory    TEXT    NOT NULL,     -- relative to the pool's folder where possible
    state        TEXT    NOT NULL,     -- JSON
    created_at_s REAL    NOT NULL
);
CREATE VIEW groups AS
SELECT g.group_id, g.prompt_id, g.state, g.lineage, g.admitted_serial, g.admitted_batch, g.phase, g.pass_rate,
g.min_serial, g.max_serial, g.batch_serial,
       g.batch_position, g.batch_serial - 1 - g.min_serial AS age, g.reason, g.detail, g.requeues,
       COUNT(r.sample) AS n_rollouts, AVG(r.reward) AS reward_mean, SUM(r.n_tokens) AS n_tokens,
       COUNT(r.cause) AS n_failures, g.admitted_at_s, g.finished_at_s, g.left_at_s
FROM rollout_group g LEFT JOIN rollout r USING (group_id) GROUP BY g.group_id;
CREATE VIEW rollouts AS
SELECT r.group_id, r.sample, g.prompt_id, g.state, g.batch_serial, r.reward, r.reward_parts, r.reason, r.cause,
       r.grader, r.finish,
       r.n_tokens, r.min_serial, r.max_serial, r.temperature, r.text
FROM rollout r JOIN rollout_group g USING (group_id);
"""
