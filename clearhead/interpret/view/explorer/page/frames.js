/** Frame times of the page in milliseconds, measured while the user hovers, zooms or scrolls. */

const LONGEST = 5000;
/** @type {number[]} */
const times = [];
let last = 0;
let until = 0;
let isRunning = false;

/** @param {number} now */
function frame(now) {
  if (last) times.push(now - last);
  if (times.length > LONGEST) times.splice(0, LONGEST / 2);
  last = now < until ? now : 0;
  isRunning = last > 0;
  if (isRunning) requestAnimationFrame(frame);
}

export function watchFrames() {
  for (const name of ["pointermove", "wheel", "scroll", "keydown"]) {
    addEventListener(name, () => {
      until = performance.now() + 150;
      if (!isRunning) requestAnimationFrame(frame);
      isRunning = true;
    }, { passive: true, capture: true });
  }
  // Exposed for the benchmark and the browser console.
  Object.assign(globalThis, { clearheadFrames: times });
}
