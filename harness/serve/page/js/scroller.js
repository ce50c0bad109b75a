const NEAR = 48;

/** Follows what grows at the end of `box` until the reader scrolls away from it. */
export class Scroller {
  constructor(box, latest) {
    this.box = box;
    this.latest = latest;
    this.following = true;
    box.addEventListener("scroll", () => {
      this.following = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
      latest.hidden = this.following;
    });
    latest.addEventListener("click", () => this.toEnd());
  }

  follow() {
    if (this.following) this.box.scrollTop = this.box.scrollHeight;
  }

  toEnd() {
    this.following = true;
    this.latest.hidden = true;
    this.follow();
  }
}
