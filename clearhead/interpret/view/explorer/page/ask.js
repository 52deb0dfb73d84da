/** Requests of a live page to the program that serves it. */

/** Error message if the program does not answer. */
const GONE = "the program does not answer: start it again, and open the address that it prints";

/**
 * @param {string} path relative to the address of the page, which has the token
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
async function ask(path, options) {
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Error(GONE);
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error ?? `the program answered ${response.status}`);
}

/**
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 */
export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

/** @param {string} path */
export async function text(path) {
  return (await ask(path)).text();
}

/**
 * @param {string} path
 * @param {Record<string, string | number>} parameters
 */
export async function bytes(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
  return new Uint8Array(await (await ask(`${path}?${query}`)).arrayBuffer());
}
