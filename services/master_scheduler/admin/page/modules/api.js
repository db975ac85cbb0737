// Calls of AdminService at the master that served this page, and whether that master answers.

import { at, clock } from "./dom.js";

const PATIENCE_MS = 15000;

export class Refused extends Error {
  // The master answered, and said no. `reason` is stable, the message is for people.
  constructor(error) {
    super(
      error.field && !error.message.includes(error.field)
        ? `${error.field}: ${error.message}`
        : error.message,
    );
    this.reason = error.reason;
  }
}

export class Unreachable extends Error {}

let lostAt = null;

export async function ask(method, request = {}) {
  const headers = { "content-type": "application/json" };
  if (at("token").value) headers.authorization = "Bearer " + at("token").value;
  let response, answer;
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    response = await fetch("admin/" + method, {
      method: "POST",
      headers,
      body: JSON.stringify(request),
      signal,
    });
    answer = await response.json();
  } catch (error) {
    throw new Unreachable(
      error.name === "TimeoutError" ? `no answer within ${PATIENCE_MS / 1000} s` : "no connection",
    );
  }
  if (response.ok) return answer;
  if (!answer.error)
    throw new Unreachable(`an answer with status ${response.status} that is not the master's`);
  throw new Refused(answer.error);
}

// Shows what went wrong in words, or that the connection is back. Returns whether it has just come back.
export function showState(error) {
  const problem = at("problem");
  const isLost = error instanceof Unreachable;
  const isBack = !isLost && lostAt !== null;
  if (isLost && lostAt === null) lostAt = Date.now();
  if (!isLost) lostAt = null;
  document.body.classList.toggle("stale", Boolean(error));
  const text = !error
    ? ""
    : isLost
      ? `The master does not answer since ${clock(lostAt)} (${error.message}). What is shown is from then. Trying again every ` +
        "2 s. If it has moved, the last line of `pdmesh groups` is its new address."
      : error.message;
  if (problem.textContent !== text) problem.textContent = text;
  problem.hidden = !text;
  return isBack;
}
